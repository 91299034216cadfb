"""Intervals of timed figures: between blocks and launches, against explicit loops, and their coverage under a load."""

import math
from functools import partial
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from perf.stats.stats import Interval, bootstrap_ends, median_interval, ratio_of_medians, t_of
from perf.timing.rounds import is_test_due

Floats = NDArray[np.float64]


def interval_of(ratios: Floats, *, confidence: float = 0.95, launches: tuple[int, ...] = ()) -> Interval:
    """Return the interval of rounds with one call each, whose reference takes one millisecond."""
    rounds = [np.array([ratio]) for ratio in ratios]
    return ratio_of_medians(rounds, [np.ones(1)] * len(rounds), confidence=confidence, launches=launches)


def bootstrapped(ratios: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Return the percentile bootstrap alone, by explicit loops over the draws."""
    draws = np.random.default_rng(0).integers(0, len(ratios), size=(1000, len(ratios)))
    medians = sorted(float(np.median([ratios[index] for index in draw])) for draw in draws)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def reach(groups: list[list[float]], quantile: float) -> float:
    """Return the half-width between groups, as a logarithm, by explicit loops."""
    logs = []
    for group in groups:
        ordered, half = sorted(group), len(group) // 2
        middle = ordered[half] if len(group) % 2 else (ordered[half - 1] + ordered[half]) / 2
        logs.append(math.log(middle))
    mean = sum(logs) / len(logs)
    variance = sum((each - mean) ** 2 for each in logs) / (len(logs) - 1)
    return quantile * math.sqrt(variance / len(logs))


@pytest.mark.parametrize("rounds", [6, 7, 12, 23, 40])
@pytest.mark.parametrize("step", [0.0, 0.2])
def test_ends_are_the_larger_of_bootstrap_and_blocks_by_loops(rounds: int, step: float) -> None:
    rng = np.random.default_rng(rounds)
    ratios = rng.lognormal(sigma=0.02, size=rounds) + step * (np.arange(rounds) >= rounds // 2)
    sizes = [rounds // 6 + (block < rounds % 6) for block in range(6)]
    starts = [sum(sizes[:block]) for block in range(6)]
    blocks = [[float(ratios[start + at]) for at in range(size)] for start, size in zip(starts, sizes, strict=True)]
    factor = math.exp(reach(blocks, NormalDist().inv_cdf(0.975)))
    low, high = bootstrapped(ratios)
    value = float(np.median(ratios))
    found = interval_of(ratios)
    assert found.low == pytest.approx(min(low, value / factor, value), rel=1e-12)
    assert found.high == pytest.approx(max(high, value * factor, value), rel=1e-12)


def test_equal_rounds_have_no_width_and_ties_only_that_of_the_others() -> None:
    same = interval_of(np.full(20, 1.25))
    assert (same.low, same.high) == pytest.approx((1.25, 1.25), rel=1e-12)
    tied = interval_of(np.array([1.0] * 17 + [1.5] * 3))
    assert tied.value == 1.0
    assert tied.low == pytest.approx(1 / math.exp(reach([[1.0]] * 5 + [[1.5]], NormalDist().inv_cdf(0.975))), rel=1e-12)


def test_few_rounds_have_no_interval_and_confidence_zero_only_the_value() -> None:
    assert not interval_of(np.linspace(1, 2, 5)).is_bounded
    assert not interval_of(np.linspace(1, 2, 7), confidence=0.99).is_bounded
    exact = interval_of(np.linspace(1, 2, 5), confidence=0.0)
    assert (exact.low, exact.high) == (1.5, 1.5)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 12, 31])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99, 0.9999])
def test_students_quantile_equals_scipys(freedom: int, confidence: float) -> None:
    assert t_of(confidence, freedom) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-8)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_launches_that_differ_widen_the_interval_by_students_quantile(count: int) -> None:
    rng = np.random.default_rng(count)
    groups = [rng.lognormal(mean=0.1 * launch, sigma=0.001, size=8 + launch) for launch in range(count)]
    launches = tuple(launch for launch, group in enumerate(groups) for _ in group)
    ratios = np.concatenate(groups)
    factor = math.exp(reach([list(group) for group in groups], float(stats.t.ppf(0.975, count - 1))))
    found, value = interval_of(ratios, launches=launches), float(np.median(ratios))
    assert (found.low, found.high) == pytest.approx((value / factor, value * factor), rel=1e-9)
    p50 = median_interval([np.array([ratio]) for ratio in ratios], launches=launches)
    assert p50.high / p50.low == pytest.approx(factor**2, rel=0.05)


def test_one_launch_has_the_interval_of_no_launches() -> None:
    ratios = np.random.default_rng(3).lognormal(size=12)
    assert interval_of(ratios, launches=(0,) * 12) == interval_of(ratios)


def test_very_different_launches_have_finite_bounds() -> None:
    found = interval_of(np.array([1.0] * 15 + [1e6] * 15), confidence=0.999, launches=(0,) * 15 + (1,) * 15)
    assert found.is_bounded


def test_interval_is_tested_at_each_growth_by_a_quarter() -> None:
    assert [rounds for rounds in range(200) if is_test_due(rounds, 16)] == [
        16,
        20,
        25,
        32,
        40,
        50,
        63,
        79,
        99,
        124,
        155,
        194,
    ]


def stopped(ratios: Floats, width: float, *, blocks: bool) -> tuple[float, float]:
    """Return the interval that ends a measurement once it is this narrow, or that of the bootstrap without blocks."""
    low, high = 0.0, math.inf
    for rounds in range(16, len(ratios) + 1):
        if is_test_due(rounds, 16):
            found = interval_of(ratios[:rounds])
            drawn = partial(medians, ratios[:rounds])
            low, high = (found.low, found.high) if blocks else bootstrap_ends(drawn, rounds, 0.95)
            if high - low < 2 * width:
                break
    return low, high


def medians(ratios: Floats, drawn: NDArray[np.int64]) -> Floats:
    return np.asarray(np.median(ratios[drawn], axis=1))


def test_interval_holds_the_true_ratio_when_a_load_starts_and_bootstrap_alone_does_not() -> None:
    """Noise of 2 % becomes 6 % when the load starts; the measurement ends at 1 %, or after 50 rounds."""
    rng = np.random.default_rng(0)
    held = {True: 0, False: 0}
    for _ in range(80):
        noise = np.where(np.arange(50) < rng.integers(0, 50), 0.02, 0.06)
        ratios = np.exp(noise * rng.standard_normal(50))
        for blocks in held:
            low, high = stopped(ratios, 0.01, blocks=blocks)
            held[blocks] += low <= 1 <= high
    assert held[True] > 0.94 * 80 > held[False]
