"""Limits that a number of inputs can never show to be kept, told before any work is done. Imports no torch."""

import math
from collections.abc import Mapping

from perf.stats.decision import (
    confidence_text,
    fewest_for_share,
    most_confidence,
    percent,
    percent_limit,
    share_interval,
)


def reaches(least: float, count: int, confidence: float) -> bool:
    """Whether the interval of all of `count` lies at a least share or above."""
    return share_interval(1.0, count, confidence).low >= least


def unreachable(shares: Mapping[str, float], *, count: int, noun: str, confidence: float) -> list[str]:
    """A sentence for each least share, by its name, that even `count` inputs without exception don't show."""
    return [
        _sentence(name, least, count, noun, confidence)
        for name, least in shares.items()
        if not reaches(least, count, confidence)
    ]


def _sentence(name: str, least: float, count: int, noun: str, confidence: float) -> str:
    enough, lowest = fewest_for_share(least, confidence), share_interval(1.0, count, confidence).low
    more = f"no number of {noun} is enough" if enough is None else f"at least {enough:,} {noun} are needed"
    lower, looser = math.floor(100 * most_confidence(least, count)) / 100, math.floor(1000 * lowest) / 1000
    return (
        f"{name} {percent_limit(least)} can't be shown by {count:,} {noun}: even {count:,} of {count:,} agreeing "
        f"would leave {percent(lowest)} to 100 % {confidence_text(confidence)}; {more}, or a confidence of at most "
        f"{lower:g}{' (the point alone decides)' * (lower == 0)}, or a limit of at most {looser:g}"
    )
