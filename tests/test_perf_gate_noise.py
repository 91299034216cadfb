"""Verdicts from ABBA blocks on a simulated machine under intermittent load.

The load slows every call by a fifth without a trace and takes the CPU from half of the calls for a scheduler slice.
Calls vary by 3 %, and one in a hundred takes five times as long.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from perf.gate.evidence import Evidence
from perf.gate.gate import JudgedRule, judge
from perf.gate.rule import rule_from_text
from perf.record.runs import Bench, SubjectRecord
from perf.timing.laps import Clock, Laps, Plan
from perf.timing.rounds import measure_pair
from tests.histories import row

RULE = rule_from_text("speedup@b8 < 0.97")
PLAN = Plan(time_limit_s=10.0, half_width_rel=0.008)
REPETITIONS = 10


@dataclass
class Machine:
    """A clock that only calls advance, with spells of load and of rest that last 1.5 s on average."""

    rng: np.random.Generator
    now_ms: float = 0.0
    loaded: bool = False
    until_ms: float = 0.0

    def clock(self) -> int:
        return round(self.now_ms * 1e6)

    def call(self, base_ms: float) -> tuple[float, float]:
        """Return the time of one call and how much of it the call waited for a CPU."""
        while self.now_ms >= self.until_ms:
            self.loaded = not self.loaded
            self.until_ms += self.rng.exponential(1500.0)
        ms = base_ms * self.rng.lognormal(sigma=0.03) * (1.2 if self.loaded else 1.0)
        ms *= 5.0 if self.rng.random() < 0.01 else 1.0
        lost_ms = self.rng.uniform(3.0, 8.0) if self.loaded and self.rng.random() < 0.5 else 0.0
        self.now_ms += ms + lost_ms
        return ms + lost_ms, lost_ms


@dataclass
class Subject:
    machine: Machine
    base_ms: float

    def laps(self, calls: int, clock: Clock) -> Laps:
        begun = self.machine.now_ms
        times, lost = zip(*(self.machine.call(self.base_ms) for _ in range(calls)), strict=True)
        return Laps(calls=calls, wall_ms=self.machine.now_ms - begun, compute_ms=times, lost_ms=lost)


def judged(candidate_ms: float, seed: int) -> tuple[JudgedRule, bool]:
    """Return the gate's verdict, and whether comparing means of 20 calls each, taken in turn, would have failed."""
    machine = Machine(np.random.default_rng(seed))
    bounds = {"dense": Subject(machine, 5.0), "reduced": Subject(machine, candidate_ms)}
    naive = [float(np.mean(bound.laps(20, machine.clock).compute_ms)) for bound in bounds.values()]
    blocks, _ = measure_pair(bounds, PLAN, calls=5, clock=machine.clock)
    subjects = (SubjectRecord(name="dense", describe={}), SubjectRecord(name="reduced", describe={}))
    bench = Bench(
        created="", command=(), environment={}, settings={}, subjects=subjects, rows=(row(8, blocks),), warnings=()
    )
    return judge([RULE], Evidence(bench=bench)).rules[0], naive[0] / naive[1] < 0.97


def test_a_a_comparison_passes_where_comparing_means_fails() -> None:
    outcomes = [judged(5.0, seed) for seed in range(REPETITIONS)]
    assert sum(verdict.verdict == "FAIL" for verdict, _ in outcomes) <= 1
    assert sum(verdict.verdict == "PASS" for verdict, _ in outcomes) >= 9
    assert sum(naive for _, naive in outcomes) >= 2


def test_true_slowdown_of_five_percent_fails() -> None:
    verdicts = [judged(5.25, 100 + seed)[0] for seed in range(REPETITIONS)]
    assert sum(verdict.verdict == "FAIL" for verdict in verdicts) >= 9
    assert not any(verdict.verdict == "PASS" for verdict in verdicts)
    values = [verdict.value for verdict in verdicts if verdict.value is not None]
    assert np.median(values) == pytest.approx(1 / 1.05, abs=0.003)
