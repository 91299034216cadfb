"""PURE: the one rule by which a figure that is known within an interval meets a limit, and its words.

It fails where the whole interval breaks the limit and passes where none of it does; else nothing is decided, and what
would decide is told. At confidence 0 the interval is the figure itself: the point alone decides.
"""

import math
from collections.abc import Callable
from typing import Literal

from .shares import fewest, percent, share_interval
from .stats import Interval

Decision = Literal["PASS", "FAIL", "INCONCLUSIVE"]
STRADDLES = "the interval straddles the limit"
MOST_TIMES = 100  # as much again is measured by nobody


def decide(low: float, high: float, breaks: Callable[[float], bool]) -> Decision:
    """By where the ends of the interval lie."""
    broken = {breaks(low), breaks(high)}
    if len(broken) == 2:
        return "INCONCLUSIVE"
    return "FAIL" if True in broken else "PASS"


def confidence_text(confidence: float) -> str:
    return f"at {100 * confidence:.6g} % confidence"


def compared_with_limit(
    figure: Interval, limit: str | None, confidence: float | None, number: Callable[[float], str]
) -> str:
    """Such as: 98.44 % (91.67 % to 99.72 % at 95 % confidence), limit 98 %. No confidence for what is known exactly."""
    sentence = number(figure.value)
    if confidence and figure.low < figure.high:
        sentence += f" ({number(figure.low)} to {number(figure.high)} {confidence_text(confidence)})"
    sentence += "" if limit is None else f", limit {limit}"
    return f"{sentence} (the point alone decides)" if confidence == 0 and limit is not None else sentence


def percent_limit(limit: float) -> str:
    return f"{100 * limit:.6g} %"


def share_against(share: float, least: float, *, count: int, noun: str, confidence: float) -> tuple[Decision, str]:
    """Whether a share of `count` is at least `least`, in words with what would decide; `noun`: what is counted."""

    def decided(count: int) -> Decision:
        ends = share_interval(share, count, confidence)
        return decide(ends.low, ends.high, lambda end: end < least)

    interval = share_interval(share, count, confidence)
    sentence = compared_with_limit(interval, percent_limit(least), confidence, percent)
    if (decision := decided(count)) != "INCONCLUSIVE":
        return decision, sentence
    return decision, f"{sentence}: {samples_for_share(lambda other: decided(other) != 'INCONCLUSIVE', count, noun)}"


def samples_for_share(decides: Callable[[int], bool], count: int, noun: str) -> str:
    """How many would decide about a share where `count` don't; `decides` tells it of any number."""
    needed = fewest(decides, count)
    if needed is None:
        return f"{STRADDLES}; the share lies on it, so that more {noun} don't decide; at confidence 0 the point does"
    return f"{STRADDLES}; about {needed:,} {noun} would decide if the share stays; these are {count:,}"


def data_factor(gap: float, width: float) -> float:
    """How many times as much data takes an interval off a limit that its figure is `gap` away from and its end `width`:
    widths shrink with the square root of it; infinite where nobody measures so much.
    """
    times = math.inf if gap == 0 else (width / gap) ** 2
    return times if times <= 1 + MOST_TIMES else math.inf


def samples_for_interval(gap: float, width: float, count: int, noun: str) -> str:
    """The same of a figure whose interval is drawn over `count`."""
    times = data_factor(gap, width)
    if not math.isfinite(times):
        return f"the figure lies on the limit; these are {count:,} {noun} and many more would not decide"
    return f"{STRADDLES}; about {max(math.ceil(times * count), count + 1):,} {noun} would decide; these are {count:,}"
