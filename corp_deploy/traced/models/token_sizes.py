"""Sizes of what nodes give where an axis that counts tokens has become shorter. PURE."""

import math
from collections.abc import Iterator, Sequence

from torch import fx


def changed_axes(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[int]:
    assert len(old) == len(new), (old, new)
    return (dim for dim, (one, other) in enumerate(zip(old, new, strict=True)) if one != other)


def resized(
    old: tuple[int, ...], new: tuple[int, ...], shape: tuple[int, ...], unit: tuple[int, int]
) -> list[int] | None:
    """What a reshaping from sizes, which are others now, gives now; None where it takes tokens apart."""
    result = list(shape)
    for entering, leaving in _alike(old, shape):
        before, now = (math.prod(sizes[at] for at in entering) for sizes in (old, new))
        if before == now:
            continue
        multiples = [at for at in leaving if shape[at] % unit[0] == 0]
        if len(multiples) != 1 or before * unit[1] != now * unit[0]:
            return None
        result[multiples[0]] = shape[multiples[0]] // unit[0] * unit[1]
    return result


def _alike(old: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Axes of two shapes of the same elements, as few at a time as have the same product."""
    one, other = 0, 0
    while one < len(old) or other < len(shape):
        entering, leaving = list(range(one, min(one + 1, len(old)))), list(range(other, min(other + 1, len(shape))))
        while (left := math.prod(old[at] for at in entering)) != (right := math.prod(shape[at] for at in leaving)):
            if left < right:
                entering.append(one + len(entering))
            else:
                leaving.append(other + len(leaving))
        one, other = one + len(entering), other + len(leaving)
        yield entering, leaving


def at_any_batch(node: fx.Node, sizes: Sequence[int]) -> list[int] | None:
    """To be reshaped to: these at a batch of 1, at any other what is left."""
    counted = [at for at, size in enumerate(node.meta["sizes"]) if not isinstance(size, int)]
    return None if len(counted) > 1 else [-1 if at in counted else size for at, size in enumerate(sizes)]
