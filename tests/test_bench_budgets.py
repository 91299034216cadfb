"""The bound on the gate's false alarms, and the slope of memory in long runs."""

from typing import Any

import pytest
from scipy.stats import binom

from benchmarks.speed.gate_alarms import document, most_alarms, tally

pytestmark = pytest.mark.nightly


def one(verdict: str, *, low: float | None = 0.99, processes: int = 1) -> dict[str, Any]:
    load = {"kinds": ["compute"] * processes, "busy_s": None}
    return {"verdict": verdict, "low": low, "high": 1.01, "seconds": 2.0, "naive_speedup": 1.0, "load": load}


def test_false_alarm_bound_is_exact_at_95_percent() -> None:
    """Three hundred without an alarm say below one percent, and fewer do not."""
    for alarms, comparisons in ((0, 40), (0, 300), (2, 320)):
        assert binom.cdf(alarms, comparisons, most_alarms(alarms, comparisons)) == pytest.approx(0.05, rel=1e-6)
    assert most_alarms(0, 300) < 0.01 < most_alarms(0, 297)
    assert most_alarms(3, 3) == 1.0


def test_verdicts_and_intervals_are_counted() -> None:
    found = tally([one("PASS"), one("INCONCLUSIVE", low=None), one("FAIL", low=1.005)])
    assert (found["PASS"], found["FAIL"], found["INCONCLUSIVE"]) == (1, 1, 1)
    assert (found["intervals"], found["intervals_that_hold_one"]) == (2, 1)
    apart = document([one("PASS", processes=0), one("PASS", processes=3)], seed=0)["by_processes"]
    assert {count: each["comparisons"] for count, each in apart.items()} == {"0": 1, "3": 1}
