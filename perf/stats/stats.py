"""Statistics of raw samples: pure functions of float64 arrays with fixed seeds.

An interval is the larger of two: the percentile bootstrap over rounds, and the spread between BLOCKS blocks of
consecutive rounds, which holds if a load starts or stops. The latter takes the normal quantile, not Student's, because
the larger of two intervals is wide enough; launches, which may be only two, take Student's.

Legend: R rounds, each an array of its calls, D bootstrap draws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure

UNBOUNDED = "no interval"
DEFAULT_CONFIDENCE = 0.95
MIN_ROUNDS = 6  # the fewest rounds whose range covers the median with DEFAULT_CONFIDENCE: 1 - 2 / 2**6 = 0.969
DRAWS = 1000
BLOCKS = MIN_ROUNDS  # so many that every interval has them
MOST_REACH = 100.0  # of a logarithm, so that the bounds of very different launches stay finite
TAIL_DRAWS = 10  # the fewest draws beyond each end of an interval
Floats = NDArray[np.float64]
Rounds = Sequence[Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its bounds, which are 0 and infinity, and never shown, for too few rounds."""

    value: float
    low: Figure
    high: Figure

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise BadInput(f"an interval needs low <= value <= high, got {self.low}, {self.value}, {self.high}")

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def half_width_rel(self) -> float:
        return (self.high - self.low) / 2 / abs(self.value) if self.value else math.inf

    @property
    def figures(self) -> tuple[float, float | None, float | None]:
        """Value, low and high for records, with None for bounds that are not finite."""
        return (self.value, self.low, self.high) if self.is_bounded else (self.value, None, None)

    def describe(self, form: str = ".2f", *, bounds: str = " ({} to {})") -> str:
        """Return a text such as `1.25 (1.20 to 1.31)`, or `1.25 (no interval)`, with numbers in this format."""
        shown = bounds.format(format(self.low, form), format(self.high, form)) if self.is_bounded else f" ({UNBOUNDED})"
        return format(self.value, form) + shown


def exact_interval(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """A percentile without interpolation, None below `needed` samples, and its upper bound at 99 % confidence."""

    value: float | None
    upper: float | None
    needed: int


def median(samples: Sequence[float] | Floats) -> float:
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def percentile(samples: Sequence[float] | Floats, percent: float) -> float:
    """Return the order statistic of rank ceil(p/100 * n), counted from one."""
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[max(math.ceil(percent / 100 * len(ordered) - 1e-9) - 1, 0)])


def upper_rank(samples: int, percent: float, confidence: float = 0.99) -> int | None:
    """Return the lowest rank with P(k-th order statistic >= true percentile) = P(Binomial(n, p) < k) >= confidence."""
    share, below = percent / 100, 0.0
    for rank in range(1, samples + 1):
        hits, log_ways = rank - 1, math.lgamma(samples + 1) - math.lgamma(rank) - math.lgamma(samples - rank + 2)
        below += math.exp(log_ways + hits * math.log(share) + (samples - hits) * math.log1p(-share))
        if below >= confidence:
            return rank
    return None


def needed_samples(percent: float, confidence: float = 0.99) -> int:
    """Return the number of samples whose second largest bounds the percentile.

    It is 64 for p90, 130 for p95 and 662 for p99, by the rule of MLPerf's early stopping with one sample above the
    bound.
    """
    share, samples = percent / 100, 1
    while share**samples + samples * (1 - share) * share ** (samples - 1) > 1 - confidence:
        samples += 1
    return samples


def tail(samples: Sequence[float] | Floats, percent: float, *, always: bool = False) -> Percentile:
    """Return a percentile with its upper bound, without values for too few samples unless `always`."""
    count, needed = len(samples), needed_samples(percent)
    if count == 0 or (count < needed and not always):
        return Percentile(value=None, upper=None, needed=needed)
    rank = upper_rank(count, percent)
    upper = None if rank is None else float(np.sort(np.asarray(samples, dtype=np.float64))[rank - 1])
    return Percentile(value=percentile(samples, percent), upper=upper, needed=needed)


def z_of(confidence: float) -> float:
    """Return the normal quantile at the end of a two-sided interval of this confidence, 0 at confidence 0."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def t_of(confidence: float, freedom: int) -> float:
    """Return Student's quantile at the end of a two-sided interval of this confidence.

    It inverts the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4) by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_confidence(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _t_confidence(angle: float, freedom: int) -> float:
    """Return P(|T| < sqrt(freedom) * tan(angle))."""
    odd, cosine = freedom % 2, math.cos(angle)
    term, total = cosine**odd, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def ratio_of_medians(
    numerator: Rounds,
    denominator: Rounds,
    *,
    launches: Sequence[int] = (),
    confidence: float = DEFAULT_CONFIDENCE,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return the median over rounds of each round's ratio of medians, in which a varying load cancels.

    `launches` is the launch of each round, empty for one launch. The interval is unbounded below `least_rounds` and
    only the value at confidence 0.
    """
    pairs = zip(numerator, denominator, strict=True)
    ratio_R = np.asarray([np.median(above) / np.median(below) for above, below in pairs])
    value = float(np.median(ratio_R))
    return _interval(
        value, len(ratio_R), lambda drawn_DR: np.median(ratio_R[drawn_DR], axis=1), launches, confidence, seed, draws
    )


def median_interval(
    rounds: Rounds, *, launches: Sequence[int] = (), confidence: float = DEFAULT_CONFIDENCE
) -> Interval:
    percentiles = partial(_drawn_percentiles, rounds, 50.0)
    return _interval(median(np.concatenate(rounds)), len(rounds), percentiles, launches, confidence)


def percentile_interval(
    rounds: Rounds, percent: float, *, launches: Sequence[int] = (), confidence: float = DEFAULT_CONFIDENCE
) -> Interval:
    percentiles = partial(_drawn_percentiles, rounds, percent)
    return _interval(percentile(np.concatenate(rounds), percent), len(rounds), percentiles, launches, confidence)


def rate_interval(
    work_R: Floats, seconds_R: Floats, *, launches: Sequence[int] = (), confidence: float = DEFAULT_CONFIDENCE
) -> Interval:
    """Return the total work over the total seconds of wall time, with its interval."""

    def rates(drawn_DR: NDArray[np.int64]) -> Floats:
        return np.asarray(work_R[drawn_DR].sum(axis=1) / seconds_R[drawn_DR].sum(axis=1))

    return _interval(float(work_R.sum() / seconds_R.sum()), len(work_R), rates, launches, confidence)


def coefficient_of_variation(samples: Sequence[float] | Floats) -> float:
    values = np.asarray(samples, dtype=np.float64)
    return float(values.std(ddof=1) / values.mean()) if len(values) > 1 else 0.0


def trend(values: Sequence[float] | Floats) -> float:
    """Return the relative change from the first value to the last, the Theil-Sen slope times length over the median."""
    series = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(len(series), k=1)
    if len(first) == 0:
        return 0.0
    slope = float(np.median((series[second] - series[first]) / (second - first)))
    return slope * (len(series) - 1) / float(np.median(series))


def trend_score(values: Sequence[float] | Floats) -> float:
    """Return Mann-Kendall's z, the excess of rises over those of an unordered series in standard deviations."""
    series = np.asarray(values, dtype=np.float64)
    count = len(series)
    if count < 3:
        return 0.0
    first, second = np.triu_indices(count, k=1)
    rises = float(np.sign(series[second] - series[first]).sum())
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return (rises - math.copysign(1, rises)) / spread if rises else 0.0


def least_rounds(confidence: float) -> int:
    """Return the fewest rounds whose range covers the median with this confidence, 1 - 2 / 2**rounds, or MIN_ROUNDS."""
    return max(MIN_ROUNDS, math.ceil(1 - math.log2(1 - confidence) - 1e-9))


def _interval(
    value: float,
    rounds: int,
    statistic: Callable[[NDArray[np.int64]], Floats],
    launches: Sequence[int],
    confidence: float,
    seed: int = 0,
    draws: int = DRAWS,
) -> Interval:
    """Return the interval of a positive statistic: the largest of rounds, of blocks of them and of launches."""
    if confidence == 0:
        return exact_interval(value)
    if rounds < least_rounds(confidence):
        return Interval(value=value, low=0.0, high=math.inf)
    reach = z_of(confidence) * standard_error(statistic, np.array_split(np.arange(rounds), BLOCKS))
    if (names := sorted({*launches}))[1:]:
        groups = [np.flatnonzero(np.asarray(launches) == name) for name in names]
        reach = max(reach, t_of(confidence, len(names) - 1) * standard_error(statistic, groups))
    factor = math.exp(min(reach, MOST_REACH))
    low, high = bootstrap_ends(statistic, rounds, confidence, seed, draws)
    return Interval(value=value, low=min(low, value / factor), high=max(high, value * factor))


def standard_error(statistic: Callable[[NDArray[np.int64]], Floats], groups: Sequence[NDArray[np.int64]]) -> float:
    """Return the standard error of the mean logarithm of a statistic over groups of rounds."""
    logs = [math.log(float(statistic(group[None])[0])) for group in groups]
    return float(np.std(logs, ddof=1)) / math.sqrt(len(logs))


def bootstrap_ends(
    statistic: Callable[[NDArray[np.int64]], Floats], rounds: int, confidence: float, seed: int = 0, draws: int = DRAWS
) -> tuple[float, float]:
    """Return the ends of the percentile bootstrap over rounds, with enough draws for TAIL_DRAWS beyond each end."""
    draws = max(draws, math.ceil(2 * TAIL_DRAWS / (1 - confidence) - 1e-9))
    drawn_D = statistic(np.random.default_rng(seed).integers(0, rounds, size=(draws, rounds)))
    tail_share = (1 - confidence) / 2
    low, high = np.quantile(drawn_D, [tail_share, 1 - tail_share])
    return float(low), float(high)


def _drawn_percentiles(rounds: Rounds, percent: float, drawn_DR: NDArray[np.int64]) -> Floats:
    """Return the percentile of the pooled samples of each draw; the samples are sorted only once."""
    pooled, owner = np.concatenate(rounds), np.repeat(np.arange(len(rounds)), [len(times) for times in rounds])
    order = np.argsort(pooled)
    pooled, owner = pooled[order], owner[order]
    percentiles = np.empty(len(drawn_DR))
    for index, row in enumerate(drawn_DR):
        cumulative = np.cumsum(np.bincount(row, minlength=len(rounds))[owner])
        percentiles[index] = pooled[np.searchsorted(cumulative, percent / 100 * cumulative[-1] - 1e-9)]
    return percentiles
