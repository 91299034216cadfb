"""Models that take uint8 pixels and normalise them inside, in the first convolution where that is exact.

A convolution that pads is left as it is: zeros around a normalised image are the mean, which no uint8 pixel equals.
"""

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ground.pixels import LARGEST, Normalisation


class PixelEntry(nn.Module):
    """An input layer from uint8 to float32, (pixel - shift) * scale by channel; without both it only casts."""

    def __init__(self, shift: Tensor | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)
        self.shift: Tensor | None
        self.scale: Tensor | None

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.to(torch.float32)
        return images if self.shift is None or self.scale is None else (images - self.shift) * self.scale


def accept_pixels(
    model: nn.Module, shape: tuple[int, ...], normalisation: Normalisation, *, folded: bool = True
) -> tuple[nn.Module, str]:
    """Return a copy that takes uint8 pixels [B,*shape], and the path of the convolution that normalises, or "".

    `folded`: the first convolution gets the weights W/(255 std) and the bias b - sum(W mean/std), if it is plain,
    unpadded and the only reader of the images. That is for float32: sixteen bits would round these weights too much.
    """
    own = copy.deepcopy(model).cpu().eval()
    path, convolution = _first_convolution(own, shape) if folded else ("", None)
    shares = normalisation.mean, normalisation.std
    mean, std = (LARGEST * torch.tensor(each, dtype=torch.float64) for each in shares)
    if convolution is not None:
        own.set_submodule(path, _folded(convolution, -mean / std, 1 / std))
    _prepend_(own, PixelEntry(_column(mean), _column(1 / std)) if convolution is None else PixelEntry())
    return own, path


def _first_convolution(model: nn.Module, shape: tuple[int, ...]) -> tuple[str, nn.Conv2d | None]:
    """Return path and module of the plain, unpadded convolution that alone reads the images, once; else "" and None."""
    images = torch.zeros(1, *shape)
    before = images._version
    calls: list[tuple[str, bool]] = []
    readers = _Readers(images)

    def hook(path: str, module: nn.Module, _: tuple[Any, ...], answer: Any) -> None:
        calls.append((path, any(derived.is_output_of(module, answer) for derived in readers.found)))

    with ExitStack() as stack, torch.no_grad(), readers:
        for path, module in model.named_modules():
            if path:
                stack.callback(module.register_forward_hook(partial(hook, path)).remove)
        model(images)
    alone = len(readers.found) == 1 and images._version == before
    path = next((path for path, is_first in calls if is_first and alone), "")
    is_once = [each for each, _ in calls].count(path) == 1
    convolution = readers.found[0].convolution if is_once else None
    return ("", None) if convolution is None else (path, convolution)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DerivedTensor:
    """The first tensor that an operation on the images gives, and the plain convolution that gives it, if one does."""

    tensor: Tensor
    version: int
    convolution: nn.Conv2d | None

    def is_output_of(self, module: nn.Module, answer: Any) -> bool:
        if self.convolution is None or answer is not self.tensor or self.tensor._version != self.version:
            return False
        return getattr(module, "weight", None) is self.convolution.weight


class _Readers(TorchFunctionMode):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.found: list[_DerivedTensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = {**(kwargs or {})}
        answer = func(*args, **arguments)
        reads = any(each is self._tensor for each in torch.utils._pytree.tree_leaves((args, arguments)))
        derived = [each for each in torch.utils._pytree.tree_leaves(answer) if isinstance(each, Tensor)]
        if reads and any(each is not self._tensor for each in derived):
            convolution = _plain_convolution(*args, **arguments) if func in _CONVOLUTIONS else None
            self.found.append(_DerivedTensor(tensor=derived[0], version=derived[0]._version, convolution=convolution))
        return answer


_CONVOLUTIONS = (torch.conv2d, torch.ops.aten.conv2d.default)  # the latter in traced programs


def _plain_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> nn.Conv2d | None:
    are_own = isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter | None)
    if groups != 1 or padding not in (0, (0, 0), [0, 0], "valid") or not are_own:
        return None
    wide, channels, *kernel = weight.shape
    sizes = [each if isinstance(each, int) else tuple(each) for each in (stride, dilation)]
    own = nn.Conv2d(channels, wide, tuple(kernel), sizes[0], 0, sizes[1], device="meta")  # type: ignore[arg-type]
    own.weight, own.bias = weight, bias
    return own.eval()


def _folded(convolution: nn.Conv2d, shift: Tensor, scale: Tensor) -> nn.Conv2d:
    """Return a convolution that maps x to `convolution` of x * scale + shift, both [C]; computed in float64."""
    own = copy.deepcopy(convolution)
    weight = convolution.weight.detach().double()
    bias = torch.einsum("ocij,c->o", weight, shift)
    if convolution.bias is not None:
        bias = bias + convolution.bias.detach().double()
    dtype = convolution.weight.dtype
    own.weight = nn.Parameter((weight * _column(scale, torch.float64)).to(dtype), requires_grad=False)
    own.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    return own


def _column(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return values.to(dtype)[:, None, None]


def _prepend_(model: nn.Module, entry: PixelEntry) -> None:
    """Add the entry as a child, called by a hook that survives copies; paths of other modules stay."""
    name = "pixels"
    while name in dict(model.named_children()):
        name += "_"
    model.add_module(name, entry)

    def enter(own: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (own.get_submodule(name)(args[0]), *args[1:])

    model.register_forward_pre_hook(enter)
