"""Change points against scipy's t-test over every split, and the promised error rates on simulated histories."""

import math
from typing import Any

import numpy as np
import pytest

from perf.stats.changes import (
    LEAST_NOISE,
    LEAST_VALUES,
    LOOKS,
    TAIL,
    ChangePoint,
    change_points,
    critical_score,
    normal_from_t,
)

stats: Any = pytest.importorskip("scipy.stats")


def split_by_scipy(values: np.ndarray, critical: float) -> tuple[int, float, float] | None:
    """The split of the whole series with the largest t, its ratio and score; None where it doesn't count."""
    logs = np.log(values)
    best = max(
        ((at, stats.ttest_ind(logs[at:], logs[:at])) for at in range(1, len(logs))),
        key=lambda split: abs(split[1].statistic),
    )
    score = normal_from_t(float(best[1].statistic), len(logs) - 2)
    if abs(score) < critical:
        return None
    return best[0], math.exp(logs[best[0] :].mean() - logs[: best[0]].mean()), score


@pytest.mark.parametrize("seed", range(20))
def test_the_first_change_is_the_largest_t_of_any_split_at_the_first_look_that_shows_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    at = int(rng.integers(6, 20))
    values = np.exp(0.01 * rng.standard_normal(25) + np.where(np.arange(25) >= at, rng.choice([-0.06, 0.06]), 0.0))
    looks = [split_by_scipy(values[:count], 3.5) for count in range(LEAST_VALUES, 26)]
    found = next((place for place, split in enumerate(looks) if split is not None), None)
    points = change_points(values, 3.5, noise=0.0)
    if found is None:
        assert points == ()
        return
    expected = looks[found]
    assert expected is not None
    assert (points[0].first, points[0].found) == (expected[0], found + LEAST_VALUES - 1)
    assert points[0].ratio.value == pytest.approx(expected[1], rel=1e-12)
    assert points[0].score == pytest.approx(expected[2], rel=1e-9)


def test_after_a_change_the_spread_is_pooled_over_all_levels() -> None:
    rng = np.random.default_rng(3)
    logs = 0.01 * rng.standard_normal(16) + np.repeat([0.0, 0.2, 0.0], [8, 6, 2])
    points = change_points(np.exp(logs), 4.0)
    assert [(point.first, point.is_rise) for point in points] == [(8, True), (14, False)]
    last = points[1]
    groups = [logs[:8], logs[8:14], logs[14 : last.found + 1]]
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    freedom = sum(len(group) for group in groups) - 3
    error = math.sqrt(within / freedom * (1 / 6 + 1 / len(groups[2])))
    step = float(groups[2].mean() - groups[1].mean())
    assert last.score == pytest.approx(normal_from_t(step / error, freedom), rel=1e-9)
    assert last.ratio.low == pytest.approx(math.exp(step - 1.96 * error), rel=1e-9)


def by_hand(values: np.ndarray, critical: float, noise: float) -> list[tuple[int, int, float, float]]:
    """First, found, ratio and score of every change, each look and split computed anew."""
    logs, start, closed = np.log(values), 0, list[np.ndarray]()
    points: list[tuple[int, int, float, float]] = []
    for count in range(LEAST_VALUES, len(logs) + 1):
        skipped = max(start, count - LOOKS)
        window, best = logs[skipped:count], (0, 0.0, 0.0)
        for at in range(1, len(window)):
            groups = [*closed, window[:at], window[at:]]
            freedom = sum(len(group) - 1 for group in groups)
            within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
            error = math.sqrt(max(within / freedom, noise**2) * (1 / at + 1 / (len(window) - at))) if freedom else 0
            step = float(window[at:].mean() - window[:at].mean())
            if error and abs(step / error) > abs(best[1]):
                best = at, step / error, math.exp(step)
        freedom = sum(len(group) - 1 for group in closed) + len(window) - 2
        if best[0] and abs(normal_from_t(best[1], freedom)) >= critical:
            first = skipped + best[0]
            points.append((first, count - 1, best[2], normal_from_t(best[1], freedom)))
            closed.append(logs[start:first])
            start = first
    return points


@pytest.mark.parametrize("seed", range(4))
def test_every_change_of_a_long_series_is_the_one_by_hand(seed: int) -> None:
    rng = np.random.default_rng(seed)
    levels = np.cumsum(rng.choice([0.0, -0.012, 0.012], size=4))
    values = np.exp(0.006 * rng.standard_normal(72) + np.repeat(levels, [36, 12, 14, 10]))
    points = change_points(values, 3.0, noise=0.004)
    expected = by_hand(values, 3.0, 0.004)
    assert [(point.first, point.found) for point in points] == [(first, found) for first, found, *_ in expected]
    assert [point.ratio.value for point in points] == pytest.approx([ratio for *_, ratio, _ in expected], rel=1e-9)
    assert [point.score for point in points] == pytest.approx([score for *_, score in expected], rel=1e-9)


@pytest.mark.parametrize("freedom", [3, 8, 28])
@pytest.mark.parametrize("t", [1.0, 3.0, 6.0, -4.0])
def test_a_score_is_the_normal_deviate_as_rare_as_the_t(t: float, freedom: int) -> None:
    exact = math.copysign(float(stats.norm.isf(stats.t.sf(abs(t), freedom))), t)
    assert normal_from_t(t, freedom) == pytest.approx(exact, rel=0.02)


def test_what_was_found_stays_as_values_come() -> None:
    rng = np.random.default_rng(8)
    values = np.exp(0.005 * rng.standard_normal(60) + np.repeat([0.0, 0.05, -0.03], 20))
    whole = change_points(values, 4.0)
    assert len(whole) >= 2
    for count in range(len(values)):
        assert change_points(values[:count], 4.0) == tuple(point for point in whole if point.found < count)


def test_equal_values_and_few_values_have_no_change() -> None:
    assert change_points([2.0] * 40, 4.0) == ()
    assert change_points([], 4.0) == ()
    assert change_points([1.0, 1.0, 9.0, 9.0], 4.0) == ()
    tiny = [1.0] * 10 + [1 + LEAST_NOISE / 2] * 10
    assert change_points(tiny, 4.0) == ()
    assert [point.first for point in change_points(tiny, 4.0, noise=1e-5)] == [10]


def test_the_critical_score_is_reached_by_that_share_of_other_histories() -> None:
    critical = critical_score(0.04)
    assert critical < critical_score(0.02) < critical_score(0.01)
    rng = np.random.default_rng(77)
    histories = np.exp(0.01 * rng.standard_t(TAIL, size=(500, LOOKS)))
    alarms = sum(bool(change_points(history, critical, noise=0.0)) for history in histories)
    low, high = stats.binom.interval(0.999, 500, 0.04)
    assert low <= alarms <= high


def _noise(rng: np.random.Generator) -> np.ndarray:
    return 0.002 * rng.standard_normal(LOOKS)


def test_a_rise_of_three_percent_is_found_within_two_releases_and_few_histories_cry_wolf() -> None:
    """Noise of the ratio to the reference, as in benchmarks/results/history.json, where there are more histories."""
    rng, critical = np.random.default_rng(2), critical_score()
    false_alarms, found = 0, 0
    for _ in range(60):
        false_alarms += bool(change_points(np.exp(_noise(rng)), critical))
        at = int(rng.integers(LEAST_VALUES, LOOKS - 2))
        points = change_points(np.exp(_noise(rng) + np.where(np.arange(LOOKS) >= at, math.log(1.03), 0)), critical)
        found += any(_is_it(point, at) for point in points)
    assert false_alarms < 60 / 20
    assert found == 60


def _is_it(point: ChangePoint, at: int) -> bool:
    return point.is_rise and abs(point.first - at) <= 2 and at <= point.found <= at + 2
