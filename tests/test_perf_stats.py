"""Statistics against independent computations: brute force, numpy, and repeated sampling."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import BadInput
from perf.stats.stats import (
    Interval,
    coefficient_of_variation,
    median,
    median_interval,
    needed_samples,
    percentile,
    percentile_interval,
    rate_interval,
    ratio_of_medians,
    tail,
    trend,
    trend_score,
    upper_rank,
)

times = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=200)


@given(times, st.sampled_from([50.0, 90.0, 95.0, 99.0]))
def test_percentile_is_the_smallest_sample_that_enough_samples_do_not_exceed(samples: list[float], p: float) -> None:
    got = percentile(samples, p)
    assert got in samples
    assert sum(x <= got for x in samples) / len(samples) >= p / 100 - 1e-12
    assert sum(x < got for x in samples) / len(samples) < p / 100
    assert got == np.percentile(samples, p, method="inverted_cdf")


def test_median_of_even_counts_is_between_the_two_middle_ones() -> None:
    assert median([3.0, 1.0]) == 2.0
    assert median([3.0, 1.0, 2.0]) == 2.0


@pytest.mark.parametrize(("percent", "count"), [(90.0, 64), (95.0, 130), (99.0, 662)])
def test_fewest_samples_for_a_tail(percent: float, count: int) -> None:
    assert needed_samples(percent) == count
    assert upper_rank(count, percent) == count - 1  # the second largest bounds it, the largest alone is not relied on
    assert upper_rank(count - 1, percent) in (count - 1, None)


def test_a_tail_of_too_few_samples_is_withheld_with_the_reason() -> None:
    p99 = tail(list(range(1, 662)), 99)
    assert p99.value is None
    assert p99.reason == "p99 needs 662 samples, there are 661"
    assert tail(list(range(1, 663)), 99).value == 656


def test_p90_is_always_told_but_bounded_only_with_enough_samples() -> None:
    few = tail([1.0, 2.0, 3.0], 90, always=True)
    assert (few.value, few.upper) == (3.0, None)
    assert tail(list(range(64)), 90, always=True).upper == 62
    assert tail([], 90, always=True).value is None


def test_upper_bound_covers_the_true_percentile_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    uppers = [tail(rng.random(100), 90).upper for _ in range(400)]
    covered = np.mean([upper is not None and upper >= 0.9 for upper in uppers])
    assert covered >= 0.975


def test_ratio_of_medians_cancels_a_load_that_comes_and_goes() -> None:
    rng = np.random.default_rng(2)
    load_R1 = np.where(rng.random((40, 1)) < 0.5, 1.0, 1.8)
    slow = 5.25 * load_R1 * rng.lognormal(sigma=0.02, size=(40, 20))
    fast = 5.00 * load_R1 * rng.lognormal(sigma=0.02, size=(40, 20))
    ratio = ratio_of_medians(list(slow), list(fast))
    assert ratio.low < 1.05 < ratio.high
    assert ratio.half_width_rel < 0.005


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for seed in range(200):
        drift_R1 = rng.lognormal(sigma=0.2, size=(20, 1))
        a, b = (drift_R1 * rng.lognormal(sigma=0.05, size=(20, 6)) for _ in "ab")
        interval = ratio_of_medians(list(a), list(b), draws=400, seed=seed)
        hits += interval.low <= 1.0 <= interval.high
    assert 180 <= hits <= 199


def test_too_few_rounds_give_no_finite_interval() -> None:
    few = [np.ones(4)] * 5
    assert ratio_of_medians([2 * ones for ones in few], few) == Interval(value=2.0, low=0.0, high=math.inf)
    assert median_interval(few).high == math.inf
    assert rate_interval(np.ones(5), np.ones(5)).high == math.inf


def test_the_same_samples_always_give_the_same_interval() -> None:
    samples = list(np.random.default_rng(4).random((12, 5)) + 1)
    assert median_interval(samples) == median_interval(samples)
    assert median_interval(samples, confidence=0.0).low == median_interval(samples).value
    narrow, usual, wide = (median_interval(samples, confidence=each) for each in (0.5, 0.95, 0.99))
    assert wide.low < usual.low < narrow.low < narrow.high < usual.high < wide.high
    assert median_interval(samples, seed=1) != median_interval(samples, seed=2)


def test_median_interval_resamples_rounds_not_samples() -> None:
    """Ten rounds, each of one value a thousand times: the spread between rounds is what the interval must show."""
    rounds = [np.full(1000, value) for value in range(1, 11)]
    interval = median_interval(rounds)
    assert interval.value == 5.5
    assert interval.high - interval.low > 2


def test_interval_of_a_percentile_is_that_of_resampled_rounds_pooled_one_by_one() -> None:
    rng = np.random.default_rng(6)
    rounds = [rng.random(size) + index for index, size in enumerate(rng.integers(1, 9, size=12))]
    picks = np.random.default_rng(0).integers(0, 12, size=(1000, 12))
    drawn = [percentile(np.concatenate([rounds[index] for index in row]), 75.0) for row in picks]
    interval = percentile_interval(rounds, 75.0)
    assert interval.low == pytest.approx(np.quantile(drawn, 0.025), abs=1e-12)
    assert interval.high == pytest.approx(np.quantile(drawn, 0.975), abs=1e-12)


def test_rounds_may_differ_in_length() -> None:
    """Medians 2 and 1, 4 and 2, ... over rounds of one to six calls."""
    slow = [np.full(index, 2.0 * index) for index in range(1, 7)]
    fast = [np.full(7 - index, 1.0 * index) for index in range(1, 7)]
    assert ratio_of_medians(slow, fast).value == 2.0
    assert percentile_interval(slow, 100.0).value == 12.0


def test_rate_is_total_over_total() -> None:
    interval = rate_interval(np.full(8, 10.0), np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0]))
    assert interval.value == 8.0
    assert interval.low < 8.0 <= interval.high == 10.0


def test_interval_refuses_a_value_outside() -> None:
    with pytest.raises(BadInput, match="low <= value <= high"):
        Interval(value=1.0, low=1.1, high=1.2)


def test_trend_is_the_relative_change_and_ignores_an_outlier() -> None:
    series = np.linspace(10.0, 9.0, 21)
    series[10] = 50.0
    assert trend(series) == pytest.approx(-1.0 / 9.5, rel=0.02)
    assert trend([1.0]) == 0.0
    assert trend_score(series) < -4
    assert abs(trend_score(np.random.default_rng(5).random(50))) < 2.58


def test_trend_score_of_a_rising_series_by_hand() -> None:
    """S = 6 of 4 points; variance 4*3*13/18 = 8.667; z = (6 - 1) / 2.944."""
    rising = [1.0, 2.0, 3.0, 4.0]
    assert all(b > a for a, b in pairwise(rising))
    assert trend_score(rising) == pytest.approx(5 / math.sqrt(4 * 3 * 13 / 18))


def test_coefficient_of_variation() -> None:
    assert coefficient_of_variation([4.0, 6.0]) == pytest.approx(math.sqrt(2) / 5)
    assert coefficient_of_variation([4.0]) == 0.0


def test_an_interval_is_told_with_its_bounds_or_without() -> None:
    known = Interval(value=1.25, low=1.2, high=1.3111)
    assert known.words() == "1.25 (1.20 to 1.31)"
    assert known.words(".3f", bounds=" [{}, {}]") == "1.250 [1.200, 1.311]"
    assert known.figures == (1.25, 1.2, 1.3111)
    few = ratio_of_medians([np.array([3.0])] * 5, [np.array([2.0])] * 5)
    assert (few.is_bounded, few.words(".1f"), few.figures) == (False, "1.5 (no interval)", (1.5, None, None))
