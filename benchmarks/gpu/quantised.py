"""Linear layers in eight bits for tensor cores, like those in engines of quantised graphs.

They serve only for timing. Each tensor has one scale, from its largest value. The outputs are only checked to be near
those of the plain model.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from corp_deploy.traced.models.module import replace_submodules

Eight = Literal["fp8", "int8"]
LARGEST: dict[Eight, float] = {"fp8": 448.0, "int8": 127.0}
TYPES: dict[Eight, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Both dimensions of a product have to be multiples of this.
MULTIPLE = 16
LEAST = 1e-6  # the smallest range, since zero has no scale


def rounded(values: Tensor, how: Eight) -> Tensor:
    """Round scaled values to eight bits, clamped to the largest."""
    held = values.clamp(-LARGEST[how], LARGEST[how])
    return (held.round() if how == "int8" else held).to(TYPES[how])


class QuantisedLinear(nn.Module):
    """A layer x [...,I] -> x W^T + b [...,O] in eight bits; `largest` is the largest magnitude of the inputs."""

    weight_OI: Tensor
    bias_O: Tensor | None
    input_scale: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear, largest: float, how: Eight) -> None:
        super().__init__()
        weight_OI, where = linear.weight.detach().float(), linear.weight.device
        self.how: Eight = how
        weight_scale = weight_OI.abs().max() / LARGEST[how]
        self.register_buffer("weight_OI", rounded(weight_OI / weight_scale, how))
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", torch.tensor(max(largest, LEAST) / LARGEST[how], device=where))
        self.register_buffer("bias_O", None if linear.bias is None else linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x_MI = rounded(x.flatten(0, -2) / self.input_scale.to(x.dtype), self.how)
        if self.how == "fp8":
            y_MO = torch._scaled_mm(
                x_MI,
                self.weight_OI.t(),
                scale_a=self.input_scale,
                scale_b=self.weight_scale,
                out_dtype=x.dtype,
            )
        else:
            scale = self.input_scale * self.weight_scale
            y_MO = (torch._int_mm(x_MI, self.weight_OI.t()) * scale).to(x.dtype)
        y_MO = y_MO if self.bias_O is None else y_MO + self.bias_O
        y: Tensor = y_MO.unflatten(0, x.shape[:-1])
        return y


def quantised(model: nn.Module, blocks: Sequence[str], images: Tensor, how: Eight) -> nn.Module:
    """Return a copy of the model with the linear layers of these blocks in eight bits, scaled by these images."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith(tuple(f"{block}." for block in blocks))
        and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    }
    largest = dict.fromkeys(layers, 0.0)

    def seen(name: str, given: Tensor) -> None:
        largest[name] = max(largest[name], float(given.abs().max()))

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen(name, given[0]))
        for name, layer in layers.items()
    ]
    with torch.inference_mode():
        model(images)
    for hook in hooks:
        hook.remove()
    return replace_submodules(
        model, {name: QuantisedLinear(layer, largest[name], how) for name, layer in layers.items()}
    ).eval()
