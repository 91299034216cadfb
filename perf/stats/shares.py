"""PURE: a share of so many, such as agreement: its score interval, and from which number on it tells."""

import math
from collections.abc import Callable
from statistics import NormalDist

from .stats import DEFAULT_CONFIDENCE, Interval

MOST = 10**9  # larger sets of inputs there are none


def wilson(hits: float, count: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share (Wilson 1927); unlike the normal one it is honest at 0 % and 100 %."""
    assert 0 <= hits <= count > 0, (hits, count)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = hits / count
    shrink = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half_width = z / shrink * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (0.0 if hits == 0 else centre - half_width), (1.0 if hits == count else centre + half_width)


def share_interval(share: float, count: int, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """The share with its bounds; at confidence 0 both are the share."""
    if confidence == 0:
        return Interval(value=share, low=share, high=share)
    low, high = wilson(min(share * count, count), count, confidence)
    return Interval(value=share, low=min(low, share), high=max(high, share))


def fewest(tells: Callable[[int], bool], least: int = 1) -> int | None:
    """The smallest number from `least` on that tells, taking for granted that more do where fewer do; None where MOST
    don't.
    """
    low, high = least - 1, least
    while not tells(high):
        if high >= MOST:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle, high)
    return high


def fewest_for_share(least: float, confidence: float = DEFAULT_CONFIDENCE) -> int | None:
    """How many have to agree, all of them, before the whole interval is at `least` or above; None where none do."""
    return fewest(lambda count: share_interval(1.0, count, confidence).low >= least)


def most_confidence(least: float, count: int) -> float:
    """At which the interval of all of `count` reaches down to `least`: Wilson's lower end is count / (count + z**2)."""
    return 1.0 if least == 0 else 2 * NormalDist().cdf(math.sqrt(count * (1 - least) / least)) - 1


def percent(share: float, decimals: int = 2) -> str:
    """99.60 %; what is not all is never rounded up to 100 %."""
    if share == 1:
        return "100 %"
    step = 10.0 ** -(decimals + 2)
    shown = 1 - step if 1 - step / 2 <= share < 1 else share
    return f"{100 * shown:.{decimals}f} %"
