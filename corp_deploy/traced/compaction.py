"""What is left of a tensor when some of its elements go, as a tensor again."""

import math

import torch
from torch import Tensor

from .labels import FIXED, compact


class Uneven(Exception):
    """What is left of a tensor is none: its rows have different lengths."""


def left(keep: Tensor) -> tuple[int, ...]:
    """The sizes of what is kept of a tensor by a mask over it: of whole slices, or as many in every line along one
    axis, the last where several will do. Raises Uneven where it is no tensor.
    """
    if not bool(keep.any()):
        raise Uneven("nothing is left")
    dims = [dim for dim in range(keep.dim()) if keep.shape[dim] > 1]
    whole = [_slices(keep, dim) for dim in range(keep.dim())]
    total = int(keep.sum())
    if math.prod(whole) == total:
        return tuple(whole)
    for dim in reversed(dims):
        lines = keep.sum(dim)
        counts = torch.unique(lines[lines > 0])
        sizes = [int(counts[0]) if each == dim else size for each, size in enumerate(whole)]
        if len(counts) == 1 and math.prod(sizes) == total:
            return tuple(sizes)
    raise Uneven(f"{total} of {tuple(keep.shape)}")


def _slices(keep: Tensor, dim: int) -> int:
    others = [each for each in range(keep.dim()) if each != dim]
    return int((keep.any(dim=others) if others else keep).sum())


def compacted(labels: Tensor, gone: Tensor) -> Tensor:
    """Tidy labels without those for which `gone` [labels] is true, still tidy. Raises Uneven."""
    small = compact(labels)
    keep = kept(small, gone)
    sizes = left(keep)
    taken = small[keep].reshape(sizes)
    return taken.expand(
        [size if of == 1 else have for size, of, have in zip(labels.shape, small.shape, sizes, strict=True)]
    )


def kept(labels: Tensor, gone: Tensor) -> Tensor:
    """Which elements stay, fixed ones always."""
    return (labels == FIXED) | ~gone[labels.clamp(min=0).long()]


def taken(tensor: Tensor, keep: Tensor) -> Tensor:
    """What is kept of a tensor by a mask that can be broadcast to it, whose axes of size 1 stay as they are."""
    axes = [dim for dim in range(keep.dim()) if keep.shape[dim] > 1]
    rest = [dim for dim in range(keep.dim()) if keep.shape[dim] == 1]
    order = [*axes, *rest]
    front = tensor.permute(order).reshape(keep.numel(), *(tensor.shape[dim] for dim in rest))
    sizes = left(keep)
    rows = front.index_select(0, torch.nonzero(keep.reshape(-1))[:, 0].to(tensor.device))
    shaped = rows.reshape([*(sizes[dim] for dim in axes), *(tensor.shape[dim] for dim in rest)])
    return shaped.permute([order.index(dim) for dim in range(len(order))]).contiguous()
