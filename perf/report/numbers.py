"""Texts of numbers, with a dash for unknown ones, and tables of text cells, whose second lines are small print."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ground.quantity import format_number
from perf.stats import decision
from perf.stats.stats import Interval, Percentile

NOTHING = "–"
MINUS = "−"


UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def count_text(value: float | None) -> str:
    """Return a count such as 22.1 M or 4.6 G."""
    return NOTHING if value is None else _in_units(value, (*UNITS, ("", 1.0))).rstrip()


def size_text(value: float | None) -> str:
    return NOTHING if value is None else f"{_in_units(value, UNITS)}B"


def _in_units(value: float, units: Sequence[tuple[str, float]]) -> str:
    rounded = float(f"{value:.3g}")
    unit, scale = next(((name, scale) for name, scale in units if rounded >= scale), units[-1])
    return f"{format_number(rounded / scale, 3)} {unit}"


def percent_text(value: float | None, decimals: int = 2) -> str:
    """Return a share such as 99.60 %, never rounded up to 100 %."""
    return NOTHING if value is None else decision.percent(value, decimals).replace("-", MINUS)


def signed_percent(value: float, decimals: int = 1) -> str:
    return f"{100 * value:+.{decimals}f} %".replace("-", MINUS)


def points_text(value: float) -> str:
    return f"{100 * value:+.2f} points".replace("-", MINUS)


def error_text(value: float | None) -> str:
    if value is None:
        return NOTHING
    return format_number(value, 2) if math.isfinite(value) else "not finite"


def number_text(value: float | None) -> str:
    if value is None:
        return NOTHING
    shown = f"{value:#.3g}".rstrip(".")
    if "e-" in shown:
        return f"{value:.{2 - math.floor(math.log10(value))}f}"
    return f"{value:,.0f}" if value >= 1000 or "e+" in shown else shown


def value_text(value: Interval | Percentile | None) -> str:
    return NOTHING if value is None else number_text(value.value)


def ratio_text(value: Interval | None) -> str:
    return NOTHING if value is None else value.describe(bounds="\n{} to {}")


def is_number(cell: str) -> bool:
    return cell in ("", NOTHING) or cell.startswith(("oom", "failed", "out of time", "not finite", *"0123456789+−"))


PAIR = ("Key", "Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of a report; `key` is its anchor, the first column names the row.

    `is_text` aligns no column right. `is_folded` hides the rows until the title is clicked.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_text: bool = False
    is_folded: bool = False

    @property
    def numeric(self) -> tuple[bool, ...]:
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        return tuple(place > 0 and not self.is_text and all(map(is_number, each)) for place, each in enumerate(columns))

    @property
    def is_pairs(self) -> bool:
        return self.columns == PAIR

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.key, self.columns, self.rows)
