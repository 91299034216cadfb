"""Widths of sites: the nearest and all multiples of an alignment, and the default multiples."""

from collections.abc import Mapping
from typing import Literal

HeadGeometry = Literal["square", "padded", "ragged"]
MIN_WIDTH = 8
Widths = Mapping[str, int]


def aligned_width(dense: int, share_kept: float, align: int) -> int:
    """Return dense * share rounded to a multiple of `align`, at least one multiple and never above dense.

    A site narrower than its alignment is aligned to 8 instead. A share of 1 keeps the width as it is.
    """
    return stepped_width(dense, share_kept, align if dense >= align else MIN_WIDTH)


def aligned_widths(dense: int, align: int) -> tuple[int, ...]:
    """Return the multiples of `align` (of 8 if dense < align) below the dense width, and that width, ascending."""
    step = align if dense >= align else MIN_WIDTH
    return (*range(step, dense, step), dense)


def narrow_step(dense: int, align: int) -> int:
    """Return the default multiple for a site's widths: `align`, or at most 8 if dense is below 2 `align`."""
    return align if dense >= 2 * align else min(align, MIN_WIDTH)


def finer_step(dense: int, least: int, align: int) -> int:
    """Return the first multiple of `least` from `align` on, else from 8 on, if it fits in dense twice; else `least`."""
    steps = (least * -(-each // least) for each in (align, MIN_WIDTH))
    return next((step for step in steps if 2 * step <= dense), least)


def stepped_width(dense: int, share_kept: float, step: int) -> int:
    """Return dense * share rounded to a multiple of `step`, at least one and never above dense; dense for share 1."""
    nearest = int(dense * share_kept / step + 0.5) * step
    return dense if share_kept == 1.0 else min(dense, max(nearest, step))
