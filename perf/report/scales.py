"""PURE: from values to pixels, with ticks a person would choose. Linear and logarithmic."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps [low, high] to pixels [start, end] (end may be smaller, as on a y axis)."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        assert self.low < self.high, (self.low, self.high)
        assert not self.log or self.low > 0, self.low

    def at(self, value: float) -> float:
        """The pixel of a value; values outside are put on the border."""
        inside = min(max(value, self.low), self.high)
        low, high, inside = (math.log(v) if self.log else v for v in (self.low, self.high, inside))
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """About 4 to 7 round values inside the range."""
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def linear(values: Iterable[float], *, start: float, end: float, zero: bool = True) -> Scale:
    """A linear scale that holds all finite values, from zero unless told otherwise, with a little air above."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = 0.08 * ((high - min(low, 0.0)) if zero else (high - low)) or 0.5 * abs(high) or 1.0
    return Scale(low=min(0.0, low) if zero else low - air, high=high + air, start=start, end=end)


def logarithmic(values: Iterable[float], *, start: float, end: float, least: float = 1e-12) -> Scale:
    """A logarithmic scale that holds all values from `least` to 1e100, with a little air on both sides."""
    finite = [max(v, least) for v in values if v < 1e100] or [1.0]
    low, high = min(finite), max(finite)
    air = (high / low) ** 0.07 if high > low else 2.0
    return Scale(low=low / max(air, 1.15), high=high * max(air, 1.15), start=start, end=end, log=True)


def short(value: float) -> str:
    """A tick label: 0.001, 1, 20, 3k, 1e-6."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1e3:g}k"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, round(decades / 5))
    digits = (1, 2, 5) if decades < 2.2 else (1,)
    ticks = [d * 10.0**e for e in range(first, last + 1) if e % every == 0 for d in digits]
    inside = [t for t in ticks if low <= t <= high]
    return inside if len(inside) > 1 else _linear_ticks(low, high)
