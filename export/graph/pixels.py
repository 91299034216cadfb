"""A model of images made to take their pixels, uint8: normalised inside, in the first convolution where that is exact.

A convolution that pads is left as it is: the zeros around a normalised image are the mean, and no uint8 pixel is.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ground.pixels import LARGEST, Normalisation

ENTRY = "pixels"


class PixelEntry(nn.Module):
    """uint8 -> (pixel - shift) * scale in float32, by channel; nothing but the cast where both are left out."""

    def __init__(self, shift: Tensor | None = None, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)
        self.shift: Tensor | None
        self.scale: Tensor | None

    def forward(self, pixels: Tensor) -> Tensor:
        images = pixels.to(torch.float32)
        return images if self.shift is None or self.scale is None else (images - self.shift) * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelModel:
    """What takes uint8 where the model took float32; `folded_into`: the convolution that normalises, empty where
    operators ahead of the model do.
    """

    model: nn.Module
    folded_into: str


def takes_pixels(
    model: nn.Module, shape: tuple[int, ...], normalisation: Normalisation, *, folded: bool = True
) -> PixelModel:
    """A copy of a model of one input that takes uint8 pixels [B,*shape] in place of normalised images.

    `folded`: the first convolution reads pixels as they are, by W/(255 std) and b - sum(W mean/std), unless something
    else reads the images than one plain convolution that does not pad. That is for float32: sixteen bits round those
    weights against the sum of all pixels, which errs more than normalising ahead, in float32.
    """
    own = copy.deepcopy(model).cpu().eval()
    path = first_convolution(own, shape) if folded else ""
    mean, std = _real(normalisation.mean), _real(normalisation.std)
    if path:
        convolution = own.get_submodule(path)
        assert isinstance(convolution, nn.Conv2d), path
        own.set_submodule(path, _folded(convolution, -mean / std, 1 / std))
    _enter_through_(own, PixelEntry() if path else PixelEntry(_column(mean), _column(1 / std)))
    return PixelModel(model=own, folded_into=path)


def _real(shares: tuple[float, ...]) -> Tensor:
    """In pixels, float64."""
    return LARGEST * torch.tensor(shares, dtype=torch.float64)


def first_convolution(model: nn.Module, shape: tuple[int, ...]) -> str:
    """The path of the plain convolution, without padding, that alone reads images [1,*shape] and is run once; empty
    where there is none.
    """
    images = torch.zeros(1, *shape)
    before = images._version
    calls: list[str] = []
    seen: list[str] = []

    def listen(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            calls.append(path)
            seen.extend([path] if args and args[0] is images else [])

        return hook

    handles = [
        module.register_forward_pre_hook(listen(path))
        for path, module in model.named_modules()
        if type(module) is nn.Conv2d and path  # a subclass may standardise its weights, or pad by itself
    ]
    try:
        with torch.no_grad(), _Readers(images) as readers:
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    plain = [path for path in seen if calls.count(path) == 1 and _is_foldable(model.get_submodule(path))]
    alone = readers.functions == [torch.conv2d] and images._version == before
    return plain[0] if alone and len(plain) == len(seen) == 1 else ""


class _Readers(TorchFunctionMode):
    """Which functions make other tensors of one."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {})}
        answer = func(*args, **given)
        reads = any(each is self._tensor for each in torch.utils._pytree.tree_leaves((args, given)))
        made = [each for each in torch.utils._pytree.tree_leaves(answer) if isinstance(each, Tensor)]
        if reads and any(each is not self._tensor for each in made):
            self.functions.append(func)
        return answer


def _is_foldable(convolution: nn.Module) -> bool:
    assert isinstance(convolution, nn.Conv2d), convolution
    return convolution.groups == 1 and convolution.padding in ((0, 0), "valid")


def _folded(convolution: nn.Conv2d, shift: Tensor, scale: Tensor) -> nn.Conv2d:
    """What gives for x what the convolution gives for x * scale + shift, both [C]; made in float64."""
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


def _enter_through_(model: nn.Module, entry: PixelEntry) -> None:
    """Modules keep their paths; the hook asks its own module, so that it holds in copies too."""
    name = ENTRY
    while name in dict(model.named_children()):
        name += "_"
    model.add_module(name, entry)

    def enter(own: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (own.get_submodule(name)(args[0]), *args[1:])

    model.register_forward_pre_hook(enter)
