"""What plain quantisation does to a torch model: the yardstick that quantised graphs are held against.

Every linear layer and convolution reads rounded inputs and rounded weights: the largest value seen is the end of the
range, nothing is balanced and nothing clipped. Sums and all between the layers stay float32.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .number_format import FORMATS, NumberFormat

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Run = Callable[[nn.Module], object]


def simulated(model: nn.Module, precision: str, run: Run) -> nn.Module:
    """A copy of `model` on the CPU that rounds. `run` runs a model on the inputs that ranges are taken of."""
    own = copy.deepcopy(model).cpu().float().eval()
    modules = own.named_modules()
    found = {name: module for name, module in modules if isinstance(module, LAYERS) and len(module.weight) > 1}
    ends = _largest_inputs(own, found, run)
    form = FORMATS[precision]
    with torch.no_grad():
        for name, layer in found.items():
            layer.weight.copy_(_rounded_weight(layer.weight, form))
            if name in ends:
                layer.register_forward_pre_hook(_rounding(form, ends[name]))
    return own


def _largest_inputs(model: nn.Module, layers: Mapping[str, nn.Module], run: Run) -> dict[str, float]:
    """By path; one that never runs has none."""
    ends: dict[str, float] = {}

    def watching(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def watch(_: nn.Module, args: tuple[Any, ...]) -> None:
            ends[name] = max(ends.get(name, 0.0), float(args[0].abs().max()))

        return watch

    handles = [layer.register_forward_pre_hook(watching(name)) for name, layer in layers.items()]
    with torch.inference_mode():
        run(model)
    for handle in handles:
        handle.remove()
    return ends


def _rounded_weight(weight: Tensor, form: NumberFormat) -> Tensor:
    values = weight.detach().numpy()
    others = tuple(range(1, values.ndim))
    scale = np.maximum(np.abs(values).max(axis=others, keepdims=True) / form.largest, 2.0**-100)
    return torch.from_numpy(form.rounded(values, scale))


def _rounding(form: NumberFormat, end: float) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    scale = max(end / form.largest, 2.0**-100)

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.from_numpy(form.rounded(args[0].detach().numpy(), scale)), *args[1:])

    return enter
