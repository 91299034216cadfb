"""Symmetric sums as what stands on and above their diagonals: half the bytes in a file, the same bits when read.

Shapes: D rows and columns, T = D (D + 1) / 2 entries of a triangle, row by row.
"""

from collections.abc import Mapping
from math import isqrt

import torch
from torch import Tensor

from ground.errors import BadInput

from .axes import triangle
from .products import upper_triangle

SYMMETRIC = frozenset(
    {"gram_FF", "zz_CC", "qq_HDD", "kk_HDD", "kk_centred_HDD", "plane_gram_HXX", "gram_GUU", "map_gram_GCC"}
)
"""Sums of x x^T, which `on_host` mirrors; per-image systems, targets and cross products are of two things."""
UPPER = ":upper"  # behind the name of a sum that is stored as a triangle


def stored_name(name: str, value: Tensor) -> str:
    """The name that a sum `site/field` is stored by: with UPPER if nothing is lost by that, to the bit, so that 0.0 is
    not -0.0.
    """
    if name.rpartition("/")[2] not in SYMMETRIC:
        return name
    bits_DD = value.view(torch.int64)
    return name + UPPER if torch.equal(bits_DD, bits_DD.mT) else name


def stored(name: str, value: Tensor) -> Tensor:
    """The form in which `value` is stored by its stored name."""
    return (upper_triangle(value) if name.endswith(UPPER) else value).contiguous()


def _square(upper_T: Tensor, where: str, remedy: str) -> Tensor:
    entries = upper_T.shape[-1] if upper_T.ndim else 0
    width = (isqrt(8 * entries + 1) - 1) // 2
    if not entries or triangle(width) != entries:
        raise BadInput(
            f"{where}: {list(upper_T.shape)} entries of a triangle, expected D (D + 1) / 2 for a matrix of D rows; "
            f"the file is damaged: {remedy}"
        )
    rows, columns = torch.triu_indices(width, width)
    square_DD = upper_T.new_empty(*upper_T.shape[:-1], width, width)
    square_DD[..., rows, columns] = upper_T
    square_DD[..., columns, rows] = upper_T
    return square_DD


def unpacked(tensors: Mapping[str, Tensor], where: str, remedy: str) -> dict[str, Tensor]:
    """The sums of one site whole and by their fields, from those stored. What is a triangle of no symmetric sum, or of
    one that is there whole, keeps its stored name. Raises BadInput for a triangle of no matrix.
    """
    sums = dict[str, Tensor]()
    for name, value in tensors.items():
        field = name.removesuffix(UPPER)
        packed = field != name and field in SYMMETRIC and field not in tensors
        sums[field if packed else name] = _square(value, f"{where}/{field}", remedy) if packed else value
    return sums
