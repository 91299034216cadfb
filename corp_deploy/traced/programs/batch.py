"""Where images stand in what a node gives: alone on an axis, or together with what else it counts, as windows are."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from .program import SHAPED, operation, sizes_at_one
from .sizes import BatchAffineSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """`axis` counts [outer, images, inner], the last fastest."""

    axis: int
    outer: int
    inner: int

    def in_front(self, x: Tensor) -> Tensor:
        """The images in front, all else [images, *sizes] as it is of one image."""
        apart = x.unflatten(self.axis, (self.outer, -1, self.inner)).movedim(self.axis + 1, 0)
        front: Tensor = apart.flatten(self.axis + 1, self.axis + 2)
        return front

    def back(self, x: Tensor) -> Tensor:
        """From [images, *sizes] to where they stood."""
        apart = x.unflatten(self.axis + 1, (self.outer, self.inner)).movedim(0, self.axis + 1)
        where_they_stood: Tensor = apart.flatten(self.axis, self.axis + 2)
        return where_they_stood


IN_FRONT = Batch(axis=0, outer=1, inner=1)
"""Images alone on the first axis."""


def batch_of(node: fx.Node) -> Batch | None:
    """Of a tensor's node; None where that can't be told, as of a program for one batch size alone."""
    way = [node]
    while (place := _alone(way[-1])) is None:
        before = next((each for each in way[-1].all_input_nodes if _counting(each) is not None), None)
        if before is None:
            return None
        way.append(before)
    for before, behind in zip(way[::-1], way[-2::-1], strict=False):
        place = _carried(place, before, behind)
        if place is None:
            return None
    return place


def _counting(node: fx.Node) -> int | None:
    """The one axis that the batch counts; of several tensors that of the first."""
    sizes = node.meta.get("sizes")
    sizes = sizes[0] if isinstance(sizes, tuple) and sizes and isinstance(sizes[0], tuple) else sizes
    axes = (
        [dim for dim, size in enumerate(sizes) if isinstance(size, BatchAffineSize)] if isinstance(sizes, tuple) else []
    )
    return axes[0] if len(axes) == 1 else None


def _sizes(node: fx.Node) -> tuple[int, ...]:
    sizes: Any = sizes_at_one(node)
    return sizes[0] if isinstance(sizes[0], tuple) else sizes


def _alone(node: fx.Node) -> Batch | None:
    axis = _counting(node)
    return None if axis is None or _sizes(node)[axis] != 1 else Batch(axis=axis, outer=1, inner=1)


def _carried(place: Batch, before: fx.Node, behind: fx.Node) -> Batch | None:
    """From a node to one that takes what it gives."""
    axis, old, new = _counting(behind), _sizes(before), _sizes(behind)
    if axis is None:
        return None
    outer, inner = place.outer, place.inner
    if operation(behind) in SHAPED:
        outer, other = divmod(math.prod(old[: place.axis]) * outer, math.prod(new[:axis]))
        inner = new[axis] // max(outer, 1)
        return None if other or outer * inner != new[axis] else Batch(axis=axis, outer=outer, inner=inner)
    times, other = divmod(new[axis], old[place.axis])
    if operation(behind) == "repeat":
        outer *= times
    elif operation(behind) == "repeat_interleave":
        inner *= times
    return Batch(axis=axis, outer=outer, inner=inner) if outer * inner == new[axis] and not other else None
