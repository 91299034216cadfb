"""Names and shapes of the sums in moments: a suffix has one letter for each axis; files hold upper triangles.

Shapes: D rows and columns, T = D (D + 1) / 2 entries of a triangle, row by row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ground.errors import BadInput

from .products import upper_triangle

INDICES = ("kept_HK", "channels_GR")
_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "images": (lambda value: value >= 1, "at least 1"),
    "taps": (lambda value: value >= 1, "at least 1"),
    "tokens": (lambda value: 0 < value < math.inf, "more than 0"),
    "map_tokens": (lambda value: 0 < value < math.inf, "more than 0"),
    "eps": (lambda value: value >= 0, "zero or more"),
}


def sum_names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if each.type is Tensor]


def axes_of_name(name: str) -> str:
    return name.rpartition("_")[2]


def shape_of(name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] for axis in axes_of_name(name))


def triangle_size(width: int) -> int:
    return width * (width + 1) // 2


def refuse_impossible(moments: Any, sizes: Mapping[str, int]) -> None:
    """Raise BadInput for a number outside its bounds and for a sum that isn't float64 or doesn't fit its axes."""
    owner = type(moments).__name__
    for name, value in ((each.name, getattr(moments, each.name)) for each in fields(moments)):
        if name in _BOUNDS and not _BOUNDS[name][0](value):
            raise BadInput(f"{owner}.{name}: got {value}, expected {_BOUNDS[name][1]}")
        if isinstance(value, Tensor) and name not in INDICES:
            shape = shape_of(name, sizes)
            if value.dtype != torch.float64 or tuple(value.shape) != shape:
                raise BadInput(f"{owner}.{name}: got {value.dtype} {list(value.shape)}, expected float64 {list(shape)}")


SYMMETRIC = frozenset(
    {"gram_FF", "zz_CC", "qq_HDD", "kk_HDD", "kk_centred_HDD", "plane_gram_HXX", "gram_GUU", "map_gram_GCC"}
)
"""Sums of x x^T, of which `move_to_host` mirrors the upper triangle. Per-image systems, targets and cross products are
not symmetric.
"""
UPPER = ":upper"  # suffix of the name of a sum that is stored as a triangle


def name_in_file(name: str, value: Tensor) -> str:
    """Return the name of a sum `site/field` in a file: with UPPER if the sum is symmetric to the bit."""
    if name.rpartition("/")[2] not in SYMMETRIC:
        return name
    bits_DD = value.view(torch.int64)
    return name + UPPER if torch.equal(bits_DD, bits_DD.mT) else name


def pack_if_upper(name: str, value: Tensor) -> Tensor:
    return (upper_triangle(value) if name.endswith(UPPER) else value).contiguous()


def _square(upper_T: Tensor, where: str, remedy: str) -> Tensor:
    entries = upper_T.shape[-1] if upper_T.ndim else 0
    width = (isqrt(8 * entries + 1) - 1) // 2
    if not entries or triangle_size(width) != entries:
        raise BadInput(
            f"{where}: {list(upper_T.shape)} entries of a triangle, expected D (D + 1) / 2 for a matrix of D rows; "
            f"the file is damaged: {remedy}"
        )
    rows, columns = torch.triu_indices(width, width)
    square_DD = upper_T.new_empty(*upper_T.shape[:-1], width, width)
    square_DD[..., rows, columns] = upper_T
    square_DD[..., columns, rows] = upper_T
    return square_DD


def unpack_triangles(tensors: Mapping[str, Tensor], where: str, remedy: str) -> dict[str, Tensor]:
    """Return one site's sums by field, with triangles completed to matrices.

    Raises BadInput for a number of entries that no triangle has.
    """
    sums = dict[str, Tensor]()
    for name, value in tensors.items():
        field = name.removesuffix(UPPER)
        packed = field != name and field in SYMMETRIC and field not in tensors
        sums[field if packed else name] = _square(value, f"{where}/{field}", remedy) if packed else value
    return sums
