"""The bound on the gate's false alarms, against the distribution that it is of."""

import random
from typing import Any

import pytest
from scipy.stats import binom

from benchmarks.trust.gate_alarms import MOST_PROCESSES, Load, document, most_alarms, tally


def one(verdict: str, *, low: float | None = 0.99, processes: int = 1) -> dict[str, Any]:
    load = {"kinds": ["compute"] * processes, "busy_s": None}
    return {"verdict": verdict, "low": low, "high": 1.01, "seconds": 2.0, "naive_speedup": 1.0, "load": load}


@pytest.mark.parametrize(("alarms", "comparisons"), [(0, 40), (0, 300), (2, 320)])
def test_at_the_bound_so_few_alarms_come_once_in_twenty(alarms: int, comparisons: int) -> None:
    bound = most_alarms(alarms, comparisons)
    assert binom.cdf(alarms, comparisons, bound) == pytest.approx(0.05, rel=1e-6)


def test_three_hundred_without_an_alarm_say_below_one_percent_and_fewer_do_not() -> None:
    assert most_alarms(0, 300) < 0.01 < most_alarms(0, 297)
    assert most_alarms(3, 3) == 1.0


def test_verdicts_and_intervals_are_counted() -> None:
    found = tally([one("PASS"), one("INCONCLUSIVE", low=None), one("FAIL", low=1.005)])
    assert (found["PASS"], found["FAIL"], found["INCONCLUSIVE"]) == (1, 1, 1)
    assert (found["intervals"], found["intervals_that_hold_one"]) == (2, 1)
    apart = document([one("PASS", processes=0), one("PASS", processes=3)], seed=0)["by_processes"]
    assert {count: each["comparisons"] for count, each in apart.items()} == {"0": 1, "3": 1}


def test_loads_are_of_all_kinds_and_the_same_every_time() -> None:
    loads = [[Load.drawn(rng) for _ in range(200)] for rng in (random.Random(1), random.Random(1))]
    assert loads[0] == loads[1]
    assert {len(load.kinds) for load in loads[0]} == set(range(MOST_PROCESSES + 1))
    assert len({kind for load in loads[0] for kind in load.kinds}) == 3
