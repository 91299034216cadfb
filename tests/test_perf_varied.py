"""Audits of timed runs: varied batches expose runners that cache results, and timed outputs must equal untimed ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ground.feeds import Feeds
from ground.ports import LOGITS, OutputPort, Port, image_port
from perf.bench.bench import BenchSubject, bench_subjects
from perf.bench.opened_subject import BATCHES, OpenedSubject, varied_batches
from perf.gate.evidence import Evidence
from perf.gate.gate import judge
from perf.gate.rule import rule_from_text
from perf.record.runs import Bench, load_bench, save_bench
from perf.report.content import Content
from perf.report.render import csv_from_content, markdown_from_content
from perf.runners.module import ModuleRunner
from perf.runners.protocol import Ledger
from perf.stats.summary import summarise
from perf.timing.laps import Bound, Clock, Laps, Plan
from tests.doubles import DoubleOfRunner, FakeClock
from tests.refusals import rejects

PLAN = Plan(min_rounds=6, max_rounds=12, time_limit_s=5.0, noise_rounds=0, audit_rounds=6)
IMAGES = np.random.default_rng(0).standard_normal((4, 3, 2, 8)).astype(np.float32)


@dataclass
class Machine(FakeClock):
    """A clock that also remembers the last input of each model."""

    seen: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Model(DoubleOfRunner):
    """A runner that takes 2 ms a call, or `again_ms` on the same input as in the call before."""

    name: str
    machine: Machine
    again_ms: float
    binds: int = 10**9
    images: bytes = b""
    inputs: tuple[Port, ...] = (image_port((3, 2, 8)),)
    outputs: tuple[OutputPort, ...] = (LOGITS,)

    def bind(self, feeds: Feeds) -> Bound:
        self.binds -= 1
        if self.binds < 0:
            raise MemoryError("out of memory")
        return replace(self, images=feeds["images"].tobytes())

    def laps(self, calls: int, clock: Clock) -> Laps:
        times = [self._call_ms() for _ in range(calls)]
        self.machine.pass_ms(sum(times))
        return Laps(calls=calls, wall_ms=sum(times), compute_ms=tuple(times))

    def _call_ms(self) -> float:
        again = self.machine.seen.get(self.name) == self.images
        self.machine.seen[self.name] = self.images
        return self.again_ms if again else 2.0


def measured(*, again_ms: Mapping[str, float], plan: Plan = PLAN, binds: int = 10**9, batch: int = 2) -> Bench:
    machine = Machine()

    def opened(name: str) -> Callable[[], Any]:
        return lambda: Model(name, machine, again_ms[name], binds=binds)

    subjects = (BenchSubject(name="dense", open=opened("dense")), BenchSubject(name="reduced", open=opened("reduced")))
    return bench_subjects(subjects, {"images": IMAGES}, (batch,), plan, described={"system": "Linux"}, clock=machine)


@pytest.mark.parametrize("rows", [1, 4])
def test_batches_differ_and_hold_the_same_numbers(rows: int) -> None:
    own = varied_batches({"images": IMAGES[:rows]}, 2)
    assert len({each["images"].tobytes() for each in own} | {IMAGES[:rows].tobytes()}) == BATCHES + 1
    for each in own:
        assert each["images"].shape == (2, 3, 2, 8)
        assert set(each["images"].ravel().tolist()) <= set(IMAGES.ravel().tolist())


def test_inputs_of_one_batch_vary_together() -> None:
    tokens = np.arange(12).reshape(3, 4)
    for each in varied_batches({"ids": tokens, "mask": 100 + tokens}, 3):
        assert np.array_equal(each["mask"], each["ids"] + 100)


def test_honest_model_takes_equal_time_on_varied_inputs(tmp_path: Path) -> None:
    record = measured(again_ms={"dense": 2.0, "reduced": 2.0})
    save_bench(record, tmp_path / "bench.json")
    assert load_bench(tmp_path / "bench.json") == record
    row = summarise(record).rows[0]
    assert {name: gain.value for name, gain in row.repeats.items()} == {"dense": 1.0, "reduced": 1.0}
    assert not any("cache" in warning for warning in record.warnings)
    assert judge([rule_from_text("speedup@b2 < 0.9")], Evidence(bench=record)).verdict == "PASS"
    assert "at most 1.00" in markdown_from_content(Content(title="t", bench=record))


def test_caching_model_is_found_by_varied_inputs() -> None:
    record = measured(again_ms={"dense": 2.0, "reduced": 0.5})
    gains = summarise(record).rows[0].repeats
    # One repeated batch is always cached, varied ones never: 2.0 / 0.5.
    assert gains["reduced"].value == pytest.approx(4.0)
    assert gains["dense"].value == pytest.approx(1.0)
    (told,) = [warning for warning in record.warnings if "cache" in warning]
    assert told.startswith("batch 2, reduced: 4.00 times as fast on one repeated batch")
    gate = judge([rule_from_text("speedup@b2 < 0.9")], Evidence(bench=record))
    assert (gate.verdict, "reduced is 4.00 times as fast" in gate.rules[0].message) == ("INCONCLUSIVE", True)
    assert "latency,reduced,2,compute,gain_on_repeats,4" in csv_from_content(Content(title="t", bench=record))


def test_few_percent_from_warm_caches_pass() -> None:
    record = measured(again_ms={"dense": 1.9, "reduced": 1.9})
    assert not any("cache" in warning for warning in record.warnings)


def test_missing_memory_skips_varied_inputs() -> None:
    record = measured(again_ms={"dense": 2.0, "reduced": 2.0}, binds=1)
    assert record.rows[0].blocks
    assert record.rows[0].repeat_blocks == {"dense": (), "reduced": ()}
    assert [warning for warning in record.warnings if "no memory to try it on varied" in warning]


class Forgetful(nn.Module):
    """A model whose first `honest` calls are right and whose later calls give zeros, as a stale graph would."""

    def __init__(self, honest: int) -> None:
        super().__init__()
        self.honest, self.calls = honest, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = images.flatten(1)[:, :5] + 1.0
        return logits if self.calls <= self.honest else torch.zeros_like(logits)


def opened(runner: ModuleRunner) -> OpenedSubject:
    return OpenedSubject("reduced", (runner,), Ledger(None), None)


@pytest.mark.parametrize(("honest", "status"), [(10**6, "PASS"), (3, "FAIL")])
def test_timed_outputs_are_compared_with_untimed_ones(honest: int, status: str) -> None:
    images = np.random.default_rng(0).standard_normal((4, 3, 2, 2)).astype(np.float32)
    with ModuleRunner(Forgetful(honest)) as runner:
        subject = opened(runner)
        bound = subject.bind({"images": images})
        bound.laps(2, perf_counter_ns)
        (found,) = subject.tests()
        assert subject.tests() == []  # the bound inputs were released
    assert (found.candidate, found.status, found.test) == ("reduced at batch 4", status, "timed-run")


class Scalar(nn.Module):
    """A model that gives one number for a whole batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.amax()


def test_model_that_ignores_its_input_is_refused() -> None:
    with ModuleRunner(Scalar(), label="m") as runner:
        subject = opened(runner)
        subject.bind({"images": np.zeros((4, 3, 2, 2), np.float32)}).laps(2, perf_counter_ns)
        rejects(r"reduced \(m\): gives logits \[\] to a batch of 4, expected a row for each", subject.tests)


def test_varied_inputs_cost_nothing_when_off() -> None:
    record = measured(again_ms={"dense": 2.0, "reduced": 0.5}, plan=replace(PLAN, audit_rounds=0))
    assert record.rows[0].repeat_blocks == {}
    assert summarise(record).rows[0].repeats == {}


def test_too_few_audit_rounds_for_an_interval_are_refused() -> None:
    rejects("the audit needs 6 rounds or 0 for none, got 3", Plan, audit_rounds=3)


def test_bound_but_untimed_inputs_are_ignored() -> None:
    with ModuleRunner(Forgetful(9)) as runner:
        subject = opened(runner)
        subject.bind({"images": np.zeros((4, 3, 2, 2), np.float32)})
        assert subject.tests() == []
