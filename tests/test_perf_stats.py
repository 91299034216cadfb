"""Statistics against scipy and explicit computations, and warnings about unstable measurements."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from perf.parity.labels import mcnemar
from perf.record.runs import BenchTrial, Row
from perf.record.states import CpuState, GpuState
from perf.runners.protocol import HostBound, ParallelStreams
from perf.stats.decision import fewest_for_share, find_fewest, most_confidence, share_interval, wilson
from perf.stats.stability import find_warnings
from perf.stats.stats import (
    Interval,
    coefficient_of_variation,
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
from tests.histories import block, row
from tests.refusals import rejects

times = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=200)


def test_tail_with_too_few_samples_is_withheld_with_the_number_needed() -> None:
    p99 = tail(list(range(1, 662)), 99)
    assert (p99.value, p99.needed) == (None, 662)
    assert tail(list(range(1, 663)), 99).value == 656


def test_p90_is_always_reported_but_bounded_only_with_enough_samples() -> None:
    few = tail([1.0, 2.0, 3.0], 90, always=True)
    assert (few.value, few.upper) == (3.0, None)
    assert tail(list(range(64)), 90, always=True).upper == 62
    assert tail([], 90, always=True).value is None


def test_same_samples_always_give_the_same_interval() -> None:
    samples = list(np.random.default_rng(4).random((12, 5)) + 1)
    assert median_interval(samples) == median_interval(samples)
    assert median_interval(samples, confidence=0.0).low == median_interval(samples).value
    narrow, usual, wide = (median_interval(samples, confidence=each) for each in (0.5, 0.95, 0.99))
    assert wide.low < usual.low < narrow.low < narrow.high < usual.high < wide.high


def test_interval_refuses_a_value_outside() -> None:
    rejects("low <= value <= high", Interval, value=1.0, low=1.1, high=1.2)


def test_single_value_has_no_trend_and_no_variation() -> None:
    assert (trend([1.0]), coefficient_of_variation([4.0])) == (0.0, 0.0)


def test_interval_prints_with_and_without_bounds() -> None:
    known = Interval(value=1.25, low=1.2, high=1.3111)
    assert known.describe() == "1.25 (1.20 to 1.31)"
    assert known.describe(".3f", bounds=" [{}, {}]") == "1.250 [1.200, 1.311]"
    assert known.figures == (1.25, 1.2, 1.3111)
    few = ratio_of_medians([np.array([3.0])] * 5, [np.array([2.0])] * 5)
    assert (few.is_bounded, few.describe(".1f"), few.figures) == (False, "1.5 (no interval)", (1.5, None, None))


PERCENTS = (50.0, 90.0, 95.0, 99.0)
Floats = NDArray[np.float64]
UNHURRIED = settings(max_examples=100, deadline=None, derandomize=True)


def rounds_of(seed: int, count: int, most: int) -> list[Floats]:
    """Draw rounds of differing lengths with log-normal times, as latencies have."""
    rng = np.random.default_rng(seed)
    return [rng.lognormal(sigma=0.3, size=int(size)) for size in rng.integers(1, most + 1, size=count)]


# Order statistics and the binomial behind them


@UNHURRIED
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=150), st.sampled_from(PERCENTS))
def test_percentile_equals_scipys_inverted_cdf(samples: list[float], percent: float) -> None:
    assert percentile(samples, percent) == stats.quantile(samples, percent / 100, method="inverted_cdf")


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_upper_rank_is_a_binomial_quantile(percent: float, confidence: float) -> None:
    for samples in (1, 2, 5, 10, 44, 45, 64, 100, 299, 458, 459, 662, 2000):
        rank = int(stats.binom.ppf(confidence, samples, percent / 100)) + 1
        assert upper_rank(samples, percent, confidence) == (rank if rank <= samples else None), samples


@pytest.mark.parametrize("percent", [80.0, 90.0, 95.0, 99.0, 99.9])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_needed_samples_is_the_smallest_sufficient_number(percent: float, confidence: float) -> None:
    def covered(samples: int) -> float:
        return float(stats.binom.cdf(samples - 2, samples, percent / 100))

    needed = needed_samples(percent, confidence)
    assert covered(needed) >= confidence > covered(needed - 1)


# Bootstrap intervals, widened by the spread between blocks: with the same seed scipy draws the same rounds


def between_blocks(theirs: Interval, figures: list[float], confidence: float = 0.95) -> Interval:
    """Return their interval, each end at least as far as the normal interval of these figures of six blocks."""
    logs = np.log(np.asarray(figures))
    reach = np.exp(stats.norm.ppf((1 + confidence) / 2) * stats.sem(logs))
    return Interval(
        value=theirs.value, low=min(theirs.low, theirs.value / reach), high=max(theirs.high, theirs.value * reach)
    )


def bootstrapped(data: tuple[Floats, ...], statistic: Callable[..., Any], value: float, confidence: float) -> Interval:
    """Return scipy's percentile interval, widened to contain the value as ours is."""
    drawn = stats.bootstrap(data, statistic, paired=len(data) > 1, vectorized=False, n_resamples=1000,
                            confidence_level=confidence, method="percentile", rng=np.random.default_rng(0))  # fmt: skip
    low, high = drawn.confidence_interval
    return Interval(value=value, low=min(float(low), value), high=max(float(high), value))


def require_same(ours: Interval, theirs: Interval) -> None:
    assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.value, theirs.low, theirs.high), rel=1e-12)
    assert ours.low < ours.high


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_ratio_of_medians_equals_scipys_bootstrap(seed: int, confidence: float) -> None:
    above, below = rounds_of(seed, 9 + 4 * seed, 7), rounds_of(seed + 10, 9 + 4 * seed, 5)
    ratios = np.asarray([np.median(a) / np.median(b) for a, b in zip(above, below, strict=True)])
    theirs = bootstrapped((ratios,), np.median, float(np.median(ratios)), confidence)
    theirs = between_blocks(theirs, [float(np.median(block)) for block in np.array_split(ratios, 6)], confidence)
    require_same(ratio_of_medians(above, below, confidence=confidence), theirs)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("percent", [50.0, 90.0])
def test_percentile_interval_equals_scipys_bootstrap_over_rounds(seed: int, percent: float) -> None:
    rounds = rounds_of(seed, 8 + 5 * seed, 9)

    def pooled(drawn: NDArray[np.int64]) -> float:
        times = np.concatenate([rounds[int(index)] for index in drawn])
        return float(np.quantile(times, percent / 100, method="inverted_cdf"))

    indices = np.arange(len(rounds))
    theirs = bootstrapped((indices.astype(np.float64),), pooled, pooled(indices), 0.95)
    blocks = [pooled(block) for block in np.array_split(indices, 6)]
    require_same(percentile_interval(rounds, percent), between_blocks(theirs, blocks))
    if percent == 50.0:
        middle = float(np.median(np.concatenate(rounds)))
        theirs = bootstrapped((indices.astype(np.float64),), pooled, middle, 0.95)
        require_same(median_interval(rounds), between_blocks(theirs, blocks))


@pytest.mark.parametrize("seed", range(4))
def test_rate_equals_scipys_paired_bootstrap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, seconds = rng.integers(1, 9, 15).astype(np.float64), rng.lognormal(size=15)
    theirs = bootstrapped((work, seconds), lambda w, s: w.sum() / s.sum(), float(work.sum() / seconds.sum()), 0.95)
    blocks = [float(work[block].sum() / seconds[block].sum()) for block in np.array_split(np.arange(15), 6)]
    require_same(rate_interval(work, seconds), between_blocks(theirs, blocks))


# Trends


@UNHURRIED
@given(st.lists(st.floats(0.1, 1e3), min_size=2, max_size=60))
def test_trend_is_the_theil_sen_slope(series: list[float]) -> None:
    slope = stats.theilslopes(series, np.arange(len(series))).slope
    expected = slope * (len(series) - 1) / np.median(series)
    assert trend(series) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@UNHURRIED
@given(st.lists(st.floats(0.1, 1e3), min_size=3, max_size=60, unique=True))
def test_trend_score_is_kendalls_with_continuity_correction(series: list[float]) -> None:
    """Mann and Kendall's S is tau times the number of pairs; scipy's z lacks the continuity correction."""
    count = len(series)
    kendall = stats.kendalltau(np.arange(count), series, method="asymptotic")
    rises = round(kendall.statistic * count * (count - 1) / 2)
    score = trend_score(series)
    if abs(rises) < 2:
        assert score == 0.0
        return
    assert np.sign(score) == np.sign(rises)
    uncorrected = abs(score) * abs(rises) / (abs(rises) - 1)
    assert 2 * stats.norm.sf(uncorrected) == pytest.approx(kendall.pvalue, rel=1e-9)


# Shares and pairs


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("images", [1, 2, 7, 50, 500, 10_000])
def test_wilson_interval_equals_scipys(images: int, confidence: float) -> None:
    for hits in {0, 1, images // 3, images // 2, images - 1, images}:
        theirs = stats.binomtest(hits, images).proportion_ci(confidence_level=confidence, method="wilson")
        assert wilson(hits, images, confidence) == pytest.approx((theirs.low, theirs.high), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
@pytest.mark.parametrize(("share", "limit"), [(63 / 64, 0.98), (1.0, 0.98), (0.97, 0.98), (0.5, 0.9), (0.0, 0.1)])
def test_smallest_deciding_sample_follows_from_the_score_test(share: float, limit: float, confidence: float) -> None:
    """A limit l is at an end of Wilson's interval of a share p if n (p - l)**2 = z**2 l (1 - l)."""
    z = float(stats.norm.ppf((1 + confidence) / 2))
    least = z**2 * limit * (1 - limit) / (share - limit) ** 2

    def decides(count: int) -> bool:
        ends = share_interval(share, count, confidence)
        return not ends.low < limit <= ends.high

    assert find_fewest(decides) == max(int(np.ceil(least)), 1)
    if share == 1.0:
        assert fewest_for_share(limit, confidence) == find_fewest(decides)
        for count in (3, 64, 150):
            assert share_interval(1.0, count, most_confidence(limit, count)).low == pytest.approx(limit)
    assert fewest_for_share(1.0, confidence) is None


@pytest.mark.parametrize(
    ("only_a", "only_b"),
    [*itertools.product((0, 1, 2, 5, 17), repeat=2), (300, 340), (0, 900), (3000, 3000), (3000, 0)],
)
def test_mcnemar_equals_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    """Each image of two classes is right for one model alone, and one more image for both."""
    images = only_a + only_b + 1
    right_a = np.arange(images) < only_a
    right_b = ~right_a
    right_a[-1] = right_b[-1] = True
    logits_a, logits_b = (np.stack([right, ~right], axis=1).astype(np.float64) for right in (right_a, right_b))
    ours = mcnemar("a", logits_a, "b", logits_b, np.zeros(images, dtype=np.int64))
    assert (ours.only_a, ours.only_b) == (only_a, only_b)
    expected = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue if only_a + only_b else 1.0
    assert ours.p_value == pytest.approx(expected, rel=1e-9)


# Warnings about unstable measurements

STATE = GpuState(
    sm_clock_mhz=1400, memory_clock_mhz=1500, temperature_c=60, power_w=200.0, throttle=(), foreign_processes=0
)

CPU = CpuState(governor=None, clock_mhz=2400, temperature_c=None, quota_cpus=1.5, paused_ms=0.0, throttle=())


def timed(call_ms: Callable[[int, int], float], *, rounds: int = 20, **every_block: Any) -> Row:
    """Make the row of ABBA rounds with blocks of ten calls, each of which takes `call_ms(round, call)`."""
    turns = [(index, name) for index in range(rounds) for name in ("dense", "reduced", "reduced", "dense")]
    return row(8, (block(at, name, [call_ms(at, call) for call in range(10)], **every_block) for at, name in turns))


def test_steady_measurement_has_no_warning() -> None:
    assert find_warnings([timed(lambda index, call: 5.0 + 0.01 * ((7 * index + call) % 5))]) == []


@pytest.mark.parametrize(
    ("shaky", "words"),
    [
        (timed(lambda index, call: 5.0 if call % 2 else 8.0), "samples vary by 23"),
        (timed(lambda index, call: 5.0 + 0.05 * index), "times drifted by +17"),
        (timed(lambda index, call: 5.0, gpu=replace(STATE, foreign_processes=2)), "2 other processes used the GPU"),
        (timed(lambda index, call: 5.0, gpu=replace(STATE, throttle=("sw_power_cap",))), "lowered the clocks in 80 of"),
        (timed(lambda index, call: 5.0, enqueue_ms=49.0), "measure with a CUDA graph"),
        (
            timed(lambda index, call: 5.0, lost_ms=(3.0,) * 10),
            "disturbed: other programs took the CPU from 100 % of the calls",
        ),
    ],
)
def test_each_kind_of_instability_is_named(shaky: Row, words: str) -> None:
    assert any(words in text for text in find_warnings([shaky])), find_warnings([shaky])


def test_device_times_have_a_tighter_variation_limit() -> None:
    varying = timed(lambda index, call: 5.0 + 0.4 * (call % 2))  # 4 %
    assert find_warnings([varying]) == []
    on_device = timed(lambda index, call: 5.0 + 0.4 * (call % 2), enqueue_ms=1.0)
    assert any("above 2.5 % is unstable" in text for text in find_warnings([on_device]))


def test_left_out_rounds_are_counted_by_reason() -> None:
    steady = timed(lambda index, call: 5.0)
    late = replace(steady.blocks[5], dropped="the time limit came within the round")
    hot = replace(steady.blocks[9], gpu=replace(STATE, throttle=("hw_slowdown", "sw_power_cap")))
    spoilt = replace(steady, blocks=(*steady.blocks[:5], late, *steady.blocks[6:9], hot, *steady.blocks[10:]))
    (told, _) = find_warnings([spoilt])
    assert told == ("batch 8, 2 of 20 rounds left out: the time limit came within the round; throttled: hw_slowdown")


@pytest.mark.parametrize(
    ("throttled", "remedy"),
    [
        ({"gpu": replace(STATE, throttle=("hw_thermal_slowdown",))}, "(hw_thermal_slowdown); cool it"),
        ({"cpu": replace(CPU, throttle=("cgroup_quota",))}, "(cgroup_quota); grant more or whole CPUs"),
    ],
)
def test_throttled_row_is_reported_with_its_remedy(throttled: dict[str, Any], remedy: str) -> None:
    told = [text for text in find_warnings([timed(lambda index, call: 5.0, **throttled)]) if "throttled" in text]
    assert len(told) == 1
    assert told[0].startswith("batch 8, throttled: the machine was throttled during almost all rounds")
    assert remedy in told[0]


def test_short_warm_up_and_failed_subject_are_reported() -> None:
    steady = timed(lambda index, call: 5.0)
    trials = {"dense": BenchTrial(status="ok"), "reduced": BenchTrial(status="failed", message="ValueError: no")}
    told = find_warnings([replace(steady, trials=trials)])
    assert "batch 8, dense: the warm-up reached its time limit before the times were flat" in told
    assert "batch 8, reduced: failed: ValueError: no" in told


def test_streams_run_concurrently_and_report_wall_time_only() -> None:
    """Two calls wait for each other, so that running them in turn would time out."""
    together = threading.Barrier(2, timeout=20)
    bound = HostBound(lambda: together.wait())
    ticks = iter(range(0, 10**9, 1_000_000))
    with ThreadPoolExecutor(2) as pool:
        laps = ParallelStreams((bound, bound), pool).laps(3, lambda: next(ticks))
    assert (laps.calls, laps.compute_ms) == (6, ())
    assert laps.wall_ms > 0


@UNHURRIED
@given(st.lists(st.floats(0.1, 1e3), min_size=2, max_size=60))
def test_coefficient_of_variation_equals_scipys(samples: list[float]) -> None:
    assert coefficient_of_variation(samples) == pytest.approx(stats.variation(samples, ddof=1), abs=1e-15)
