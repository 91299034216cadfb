"""Tallies of comparisons of a workload with itself, by planted ratios."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.pages.measurement_page import gate_alarms
from benchmarks.speed.gate_alarms import (
    bootstrap_of,
    document,
    interval_of,
    is_due_by_eighths,
    measured_until,
    most_alarms,
    tally,
    total,
)
from perf.stats.stats import Interval

pytestmark = pytest.mark.nightly


def one(ratio: float, *, rounds: int = 20, spread: float = 0.005, disturbed: bool = False) -> dict[str, Any]:
    units = 1e5 * (ratio * np.random.default_rng(0).lognormal(sigma=spread, size=rounds) - 1)
    ratios = " ".join(str(round(unit)) for unit in units)
    return {"load_average": 2.0, "disturbed": disturbed, "naive_speedup": 1.04, "ratios": ratios}


def test_false_alarm_bound_is_exact_at_95_percent() -> None:
    """Three hundred without an alarm say below one percent, and fewer do not."""
    for alarms, comparisons in ((0, 40), (0, 300), (2, 320)):
        assert binom.cdf(alarms, comparisons, most_alarms(alarms, comparisons)) == pytest.approx(0.05, rel=1e-6)
    assert most_alarms(0, 300) < 0.01 < most_alarms(0, 297)
    assert most_alarms(3, 3) == 1.0


def test_verdicts_and_intervals_are_counted() -> None:
    comparisons = [one(1.0), one(0.97), one(1.03), one(1.03, disturbed=True), one(1.0, rounds=5)]
    found = tally(comparisons)
    assert (found["comparisons"], found["intervals"], found["hold_one"], found["bootstrap_hold_one"]) == (5, 4, 1, 1)
    assert found["verdicts"] == {
        "equal": {"INCONCLUSIVE": 3, "FAIL": 1, "PASS": 1},
        "swapped": {"INCONCLUSIVE": 3, "PASS": 1, "FAIL": 1},
        "slower by 5 %": {"FAIL": 3, "INCONCLUSIVE": 2},
    }
    assert (found["naive_apart"], found["median_load_average"], found["median_rounds"]) == (5, 2.0, 16)
    assert found["width_to_bootstrap"] >= 1
    assert total([found, found]) == {
        "comparisons": 10, "false_alarms": 2, "false_alarms_below": most_alarms(2, 10)
    }  # fmt: skip
    record = document({"quiet": comparisons}, seed=0) | {"tallies": {"quiet": found}}
    assert "| 2.0 | 5 | 4 | 1 (25.0 %) | 1 (25.0 %) |" in gate_alarms(record)


def test_measurement_ends_at_the_first_test_with_a_narrow_interval() -> None:
    """The width falls with the rounds, and 20 rounds are narrow enough; eighths test at 20, quarters at 25."""
    ratio_R = np.ones(40)

    def interval(some_R: Any) -> Interval:
        return Interval(value=1.0, low=1 - 0.19 / len(some_R), high=1 + 0.19 / len(some_R))

    assert len(measured_until(ratio_R, interval, is_due_by_eighths)) == 20
    assert len(measured_until(ratio_R, interval, lambda rounds, least: rounds in (16, 25))) == 25
    assert len(measured_until(ratio_R[:19], interval, is_due_by_eighths)) == 19


def test_older_interval_is_the_bootstrap_alone() -> None:
    """A late step leaves the median of most draws as it was, and the last block differs."""
    ratio_R = np.repeat([1.0, 1.5], [17, 3])
    new, older = interval_of(ratio_R), bootstrap_of(ratio_R)
    assert new.half_width_rel > older.half_width_rel
    assert not bootstrap_of(ratio_R[:5]).is_bounded
    assert math.isfinite(bootstrap_of(ratio_R[:6]).high)
