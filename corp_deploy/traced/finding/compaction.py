"""What remains of a tensor when some of its elements are removed, as a tensor again."""

import math
from typing import Any

import torch
from torch import Tensor

from .labels import FIXED, LabelTensor, compact


class Uneven(Exception):
    """What remains of a tensor is none: its rows have different lengths."""


def kept(labels: Tensor, gone: Tensor) -> Tensor:
    """Which elements stay, fixed ones always; `gone` [labels] says of each label whether it is removed."""
    return (labels == FIXED) | ~gone[labels.clamp(min=0)]


def remaining(keep: Tensor) -> tuple[int, ...]:
    """The sizes of what is kept of a tensor by a mask over it: of whole slices, or as many in every line along one
    axis, the last where several will do. Raises Uneven where it is no tensor.
    """
    total = int(keep.sum())
    kept_sizes = tuple(int(_any_besides(keep, dim).sum()) for dim in range(keep.dim()))
    if math.prod(kept_sizes) == total > 0:
        return kept_sizes
    for dim in (dim for dim in reversed(range(keep.dim())) if keep.shape[dim] > 1):
        counts = torch.unique(keep.sum(dim))
        sizes = (*kept_sizes[:dim], int(counts[-1]), *kept_sizes[dim + 1 :])
        if len(counts[counts > 0]) == 1 and math.prod(sizes) == total > 0:
            return sizes
    raise Uneven(f"{total} of {tuple(keep.shape)}")


def _any_besides(keep: Tensor, dim: int) -> Tensor:
    others = [each for each in range(keep.dim()) if each != dim]
    return keep.any(dim=others) if others else keep


def compacted(labels: Tensor, gone: Tensor) -> Tensor:
    """Tidy labels without those that are removed, still tidy. Raises Uneven."""
    small = compact(labels)
    keep = kept(small, gone)
    sizes = remaining(keep)
    full_sizes = [size if of == 1 else have for size, of, have in zip(labels.shape, small.shape, sizes, strict=True)]
    return small[keep].reshape(sizes).expand(full_sizes)


def narrowed(value: Any, gone: Tensor) -> Any:
    """What remains of what a node gives, as Marks; numbers as they are. Raises Uneven."""
    if isinstance(value, tuple):
        return tuple(narrowed(each, gone) for each in value)
    if not isinstance(value, LabelTensor) or value.labels is None:
        return value
    labels = compacted(value.labels, gone)
    return LabelTensor(tuple(labels.shape), labels, value.why)


def loses(value: Any, gone: Tensor) -> bool:
    """Whether elements of what a node gives are removed."""
    if isinstance(value, tuple):
        return any(loses(each, gone) for each in value)
    return (
        isinstance(value, LabelTensor)
        and value.labels is not None
        and not bool(kept(compact(value.labels), gone).all())
    )


def selected(tensor: Tensor, keep: Tensor) -> Tensor:
    """What is kept of a tensor by a mask that can be broadcast to it, on any device; axes that only the mask has are
    spread out first.
    """
    tensor = tensor.expand(torch.broadcast_shapes(tensor.shape, keep.shape))
    axes = tuple(dim for dim in range(keep.dim()) if keep.shape[dim] > 1)
    front, sizes = tuple(range(len(axes))), remaining(keep)
    if tensor.is_meta:
        return tensor.new_empty([sizes[dim] if dim in axes else size for dim, size in enumerate(tensor.shape)])
    rows = tensor.movedim(axes, front).flatten(0, len(axes) - 1)
    chosen = rows.index_select(0, torch.nonzero(keep.reshape(-1))[:, 0].to(tensor.device))
    shaped: Tensor = chosen.unflatten(0, [sizes[dim] for dim in axes])
    return shaped.movedim(front, axes).contiguous()
