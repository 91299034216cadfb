"""PURE: decisions whether a figure with an interval meets a limit, in words, and score intervals of shares.

A figure fails if its whole interval breaks the limit and passes if none of it does. Otherwise the sentence says how
much more data would decide.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Literal

from .stats import DEFAULT_CONFIDENCE, Interval, exact_interval, z_of

MOST = 10**9  # inputs; no larger set is considered


def wilson(hits: float, count: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927), which unlike the normal one holds at 0 % and 100 %."""
    assert 0 <= hits <= count > 0, (hits, count)
    z = z_of(confidence)
    share = hits / count
    shrink = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / shrink
    half_width = z / shrink * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (0.0 if hits == 0 else centre - half_width), (1.0 if hits == count else centre + half_width)


def share_interval(share: float, count: int, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    if confidence == 0:
        return exact_interval(share)
    low, high = wilson(min(share * count, count), count, confidence)
    return Interval(value=share, low=min(low, share), high=max(high, share))


def paired_interval(gained: int, lost: int, count: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of (gained - lost) / count, the difference of two shares of the same inputs.

    `gained` counts inputs on which only the second model is right, `lost` those of the first. The ends are the
    differences at which Tango's score test (Statistics in Medicine 17, 1998, eq. 4) has the two-sided p value
    1 - confidence. Unlike the normal interval it holds if no or all answers changed.
    """
    assert 0 <= gained + lost <= count > 0, (gained, lost, count)
    change, z = (gained - lost) / count, z_of(confidence)
    if z == 0:
        return change, change

    def score(difference: float) -> float:
        b = -gained - lost + (2 * count - gained + lost) * difference
        root = math.sqrt(max(b * b + 8 * count * lost * difference * (1 - difference), 0.0))
        losses = max((root - b) / (4 * count), 0.0)
        variance = count * (2 * losses + difference * (1 - difference))
        top = gained - lost - count * difference
        if variance <= 0:
            return math.copysign(math.inf, top) if top else 0.0
        return top / math.sqrt(variance)

    def end(beyond: float) -> float:
        inside, outside = change, beyond
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) < z else (inside, middle)
        return outside

    return end(-1.0), end(1.0)


def find_fewest(decides: Callable[[int], bool], least: int = 1) -> int | None:
    """Return the smallest number from `least` on that decides, if all larger ones do too; None beyond MOST."""
    low, high = least - 1, least
    while not decides(high):
        if high >= MOST:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def fewest_for_share(least: float, confidence: float = DEFAULT_CONFIDENCE) -> int | None:
    """Return the smallest count whose interval at 100 % agreement begins at `least` or above; None if there is none."""
    return find_fewest(lambda count: share_interval(1.0, count, confidence).low >= least)


def most_confidence(least: float, count: int) -> float:
    """Return the confidence at which Wilson's lower end of 100 %, count / (count + z**2), is `least`."""
    return 1.0 if least == 0 else 2 * NormalDist().cdf(math.sqrt(count * (1 - least) / least)) - 1


def percent(share: float, decimals: int = 2) -> str:
    """Return a share in percent, never rounded up to 100 %."""
    if share == 1:
        return "100 %"
    step = 10.0 ** -(decimals + 2)
    shown = 1 - step if 1 - step / 2 <= share < 1 else share
    return f"{100 * shown:.{decimals}f} %"


Decision = Literal["PASS", "FAIL", "INCONCLUSIVE"]
STRADDLES = "the interval straddles the limit"
MOST_TIMES = 100  # times more data than this is never suggested


def decide(low: float, high: float, breaks: Callable[[float], bool]) -> Decision:
    broken = {breaks(low), breaks(high)}
    if len(broken) == 2:
        return "INCONCLUSIVE"
    return "FAIL" if True in broken else "PASS"


def confidence_text(confidence: float) -> str:
    return f"at {100 * confidence:.6g} % confidence"


def compared_with_limit(
    figure: Interval, limit: str | None, confidence: float | None, number: Callable[[float], str]
) -> str:
    """Return a text such as `98.44 % (91.67 % to 99.72 % at 95 % confidence), limit 98 %`.

    `confidence` is None for a figure that is known exactly.
    """
    sentence = number(figure.value)
    if confidence and figure.low < figure.high:
        sentence += f" ({number(figure.low)} to {number(figure.high)} {confidence_text(confidence)})"
    sentence += "" if limit is None else f", limit {limit}"
    return f"{sentence} (the point alone decides)" if confidence == 0 and limit is not None else sentence


def percent_change(change: float) -> str:
    return f"{100 * change:+.2f} %"


def percent_limit(limit: float) -> str:
    return f"{100 * limit:.6g} %"


def share_against(share: float, least: float, *, count: int, noun: str, confidence: float) -> tuple[Decision, str]:
    """Decide whether a share of `count` is at least `least`, with a sentence; `noun` names the counted inputs."""

    def decided(count: int) -> Decision:
        ends = share_interval(share, count, confidence)
        return decide(ends.low, ends.high, lambda end: end < least)

    sentence = compared_with_limit(share_interval(share, count, confidence), percent_limit(least), confidence, percent)
    if (decision := decided(count)) == "INCONCLUSIVE":
        sentence += f": {samples_for_share(lambda other: decided(other) != 'INCONCLUSIVE', count, noun)}"
    return decision, sentence


def samples_for_share(decides: Callable[[int], bool], count: int, noun: str) -> str:
    needed = find_fewest(decides, count)
    if needed is None:
        return f"{STRADDLES}; the share lies on it, so that more {noun} don't decide; at confidence 0 the point does"
    return f"{STRADDLES}; about {needed:,} {noun} would decide if the share stays; these are {count:,}"


def data_factor(gap: float, width: float) -> float:
    """Return the factor of data that shrinks an interval's reach from `width` to `gap`; infinite beyond MOST_TIMES."""
    times = math.inf if gap == 0 else (width / gap) ** 2
    return times if times <= 1 + MOST_TIMES else math.inf


def samples_for_interval(gap: float, width: float, count: int, noun: str) -> str:
    times = data_factor(gap, width)
    if not math.isfinite(times):
        return f"the figure lies on the limit; these are {count:,} {noun} and many more would not decide"
    return f"{STRADDLES}; about {max(math.ceil(times * count), count + 1):,} {noun} would decide; these are {count:,}"
