"""What a field of moments is by its name: the suffix of a sum has a letter for each axis, and numbers have bounds."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ground.errors import BadInput

INDICES = ("kept_HK", "channels_GR")
_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "images": (lambda value: value >= 1, "at least 1"),
    "taps": (lambda value: value >= 1, "at least 1"),
    "tokens": (lambda value: 0 < value < math.inf, "more than 0"),
    "map_tokens": (lambda value: 0 < value < math.inf, "more than 0"),
    "eps": (lambda value: value >= 0, "zero or more"),
}


def sums_of(kind: Any) -> list[str]:
    """The sums that moments of a kind always have."""
    return [each.name for each in fields(kind) if each.type is Tensor]


def axes_of(name: str) -> str:
    """`gram_FF` -> `FF`."""
    return name.rpartition("_")[2]


def shape_of(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a sum by the sizes of its axes."""
    return tuple(sizes[axis] for axis in axes_of(name))


def triangle(width: int) -> int:
    """Entries on and above the diagonal of a matrix."""
    return width * (width + 1) // 2


def refuse_impossible(moments: Any, sizes: Mapping[str, int]) -> None:
    """Raises BadInput for a number beyond its bounds and for a sum that isn't float64 of its axes, the field named."""
    owner = type(moments).__name__
    for name in [each.name for each in fields(moments)]:
        value = getattr(moments, name)
        if name in _BOUNDS and not _BOUNDS[name][0](value):
            raise BadInput(f"{owner}.{name}: got {value}, expected {_BOUNDS[name][1]}")
        if isinstance(value, Tensor) and name not in INDICES:
            shape = shape_of(name, sizes)
            if value.dtype != torch.float64 or tuple(value.shape) != shape:
                raise BadInput(f"{owner}.{name}: got {value.dtype} {list(value.shape)}, expected float64 {list(shape)}")
