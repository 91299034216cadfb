"""Widths that sites have and may have. PURE."""

from collections.abc import Mapping
from typing import Literal

HeadGeometry = Literal["square", "padded", "ragged"]
MIN_WIDTH = 8


Width = int
Widths = Mapping[str, Width]


def aligned_width(dense: int, share_kept: float, align: int) -> int:
    """The width kept: dense * share to the nearest multiple of `align`, never above dense.

    At least 8, or `align` where a finer one is asked for. A share of 1 keeps the width as it is. A site narrower than
    its alignment is aligned to 8 instead.
    """
    return stepped_width(dense, share_kept, align if dense >= align else MIN_WIDTH)


def aligned_widths(dense: int, align: int) -> tuple[int, ...]:
    """Every width a site may have under an alignment, the dense one included, narrowest first."""
    step = align if dense >= align else MIN_WIDTH
    return (*range(step, dense, step), dense)


def narrow_step(dense: int, align: int) -> int:
    """Return the multiple that widths of a site have by default: `align`, or 8 if that leaves it no narrower width."""
    return align if dense >= 2 * align else min(align, MIN_WIDTH)


def finer_step(dense: int, least: int, align: int) -> int:
    """Return the multiple for channels of convolutions, finer than asked where that would leave no choice."""
    steps = (least * -(-each // least) for each in (align, MIN_WIDTH))
    return next((step for step in steps if 2 * step <= dense), least)


def stepped_width(dense: int, share_kept: float, step: int) -> int:
    """dense * share to the nearest multiple of `step`, at least one step and never above dense."""
    nearest = int(dense * share_kept / step + 0.5) * step
    return dense if share_kept == 1.0 else min(dense, max(nearest, step))


def is_empty(width: Width) -> bool:
    """Whether a constant is all that stays of a site: the bias of its last layer."""
    return width == 0
