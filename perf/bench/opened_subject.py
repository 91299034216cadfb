"""An opened subject with its runners and their memory, and its trial at one batch size.

Outputs of timed calls are compared with those of plain calls (MLPerf Inference's compliance test 01), and times on one
repeated batch with times on varied ones (test 04).
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import chain, cycle, repeat
from typing import Any

import numpy as np

from ground.errors import BadInput, Missing, is_out_of_memory
from ground.feeds import Feeds, batch_size, checked_outputs, feeds_of_ports, fill_batch
from perf.parity.structure import StructuralTest, check_timed_run
from perf.record.runs import BenchTrial, Status, TimedBlock
from perf.runners.protocol import HostBound, Ledger, ParallelStreams, Runner
from perf.stats.summary import ONE, VARIED
from perf.timing.laps import Bound, Clock, Laps, Plan, TimeLimit, WarmUp, warm_up
from perf.timing.rounds import measure_rounds
from perf.timing.watch import Watch

BATCHES = 4
CALLS_AROUND = 2 * BATCHES + BATCHES + 1  # calls before the rounds, and plain calls to compare outputs with


def varied_batches(feeds: Feeds, batch: int) -> list[Feeds]:
    """Return BATCHES batches of these inputs [N, ...], shifted along the first and the last axis."""

    def shifted(array: np.ndarray, step: int) -> np.ndarray:
        rows = np.roll(array, -step, axis=0)
        return np.roll(rows, step, axis=-1) if rows.ndim > 1 else rows

    steps = range(1, BATCHES + 1)
    return [fill_batch({name: shifted(array, step) for name, array in feeds.items()}, batch) for step in steps]


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Bound batches of one runner, called in turn."""

    bounds: Iterator[Bound]

    def laps(self, calls: int, clock: Clock) -> Laps:
        return joined_laps([next(self.bounds).laps(1, clock) for _ in range(calls)])


def joined_laps(laps: list[Laps]) -> Laps:
    """Return several laps as one, without the times that any of them lacks."""
    every = {each.name: [getattr(lap, each.name) for lap in laps] for each in fields(Laps)}
    known = {name: values for name, values in every.items() if None not in values}
    totals: dict[str, Any] = {name: sum(known[name]) for name in ("calls", "wall_ms", "enqueue_ms") if name in known}
    times: dict[str, Any] = {name: tuple(chain(*known[name])) for name in known.keys() - totals.keys()}
    return Laps(**totals, **times)


def round_robin_calls(calls: int) -> int:
    """Return calls rounded to whole turns over the bound batches, at least one turn."""
    return max(round(calls / BATCHES), 1) * BATCHES


def repeat_blocks(
    bind: Callable[[Feeds], Bound], feeds: Feeds, batch: int, rounds: int, *, calls: int, limit: TimeLimit, watch: Watch
) -> tuple[TimedBlock, ...]:
    """Measure one repeated batch against varied ones, with equally many calls of each."""
    varied = [bind(each) for each in varied_batches(feeds, batch)]
    pair = {VARIED: RoundRobin(cycle(varied)), ONE: RoundRobin(repeat(bind(fill_batch(feeds, batch))))}
    for bound in pair.values():
        bound.laps(BATCHES, limit.clock)
    turns = round_robin_calls(calls)
    return measure_rounds(pair, rounds, calls=turns, clock=limit.clock, watch=watch, limit_s=limit.left_s)


BOUND = 1e-4


@dataclass(slots=True)
class Sample:
    """One batch bound to a runner, and the outputs of the last timed call on it."""

    runner: Runner
    feeds: Feeds
    bound: HostBound
    _answer: object = field(default=None, init=False, repr=False)

    def bound_to_keep(self) -> Bound:
        call = self.bound.call

        def keeping() -> None:
            self._answer = call()

        return replace(self.bound, call=keeping)

    def test(self, name: str) -> StructuralTest | None:
        """Compare the last timed outputs, if any, with a plain call's. Raises BadInput for another batch size."""
        if self._answer is None:
            return None
        batch = batch_size(self.feeds)
        where = f"{name} ({self.runner.describe().get('model', 'in memory')})"
        timed = checked_outputs(self.bound.outputs(self._answer), batch, where=where)
        return check_timed_run(f"{name} at batch {batch}", timed, self.runner(self.feeds), bound=BOUND)


UNTRIED = BenchTrial(status="ok")


@dataclass(slots=True)
class OpenedSubject:
    """A subject's runners, one per stream, with its trial and its bound batch at the current batch size."""

    name: str
    runners: tuple[Runner, ...]
    ledger: Ledger
    pool: ThreadPoolExecutor | None
    trial: BenchTrial = UNTRIED
    bound: Bound | None = None
    _samples: list[Sample] = field(default_factory=list)

    @property
    def fastest_s(self) -> float:
        return min(self.trial.warm_up_samples_ms, default=math.inf) / 1e3

    @property
    def call_s(self) -> float:
        return WarmUp(samples_ms=self.trial.warm_up_samples_ms, flat=self.trial.warm_up_flat).call_ms() / 1e3

    def bind(self, feeds: Feeds) -> Bound:
        bounds = tuple(self._bound(runner, feeds_of_ports(feeds, runner.inputs)) for runner in self.runners)
        return bounds[0] if self.pool is None else ParallelStreams(bounds, self.pool)

    def _bound(self, runner: Runner, feeds: Feeds) -> Bound:
        bound = runner.bind(feeds)
        if not isinstance(bound, HostBound):
            return bound
        self._samples.append(Sample(runner, feeds, bound))
        return self._samples[-1].bound_to_keep()

    def tests(self) -> list[StructuralTest]:
        """Compare the outputs of timed calls with those of plain calls, and release the bound batches."""
        tests = [sample.test(self.name) for sample in self._samples]
        self.release()
        return [test for test in tests if test is not None]

    def release(self) -> None:
        self._samples.clear()
        self.trial, self.bound = UNTRIED, None

    def first_call(self, feeds: Feeds, batch: int, plan: Plan, limit: TimeLimit) -> None:

        def work() -> tuple[Bound, WarmUp]:
            bound = self.bind(fill_batch(feeds, batch))
            late = limit.left_s <= 0
            return bound, WarmUp(samples_ms=(), flat=False) if late else warm_up(bound, plan, limit.clock, limit_s=0.0)

        self._run_phase(work)

    def warm(self, plan: Plan, limit: TimeLimit, limit_s: float) -> None:
        bound, begun = self.bound, self.trial.warm_up_samples_ms
        assert bound is not None, self.name
        self._run_phase(lambda: (bound, warm_up(bound, plan, limit.clock, begun=begun, limit_s=limit_s)))

    def _run_phase(self, work: Callable[[], tuple[Bound, WarmUp]]) -> None:
        """Run `work` and store its result; out of memory or another failure becomes the trial's status."""
        try:
            (self.bound, warmed), peak = self.ledger.phase(work)
        except (BadInput, Missing):
            raise
        except Exception as error:
            status: Status = "oom" if is_out_of_memory(error) else "failed"
            self.trial, self.bound = BenchTrial(status=status, message=f"{type(error).__name__}: {error}"[:500]), None
            return
        self.trial = replace(
            self.trial,
            warm_up_samples_ms=warmed.samples_ms,
            warm_up_flat=warmed.flat,
            peak_memory_bytes=peak if peak is None else max(peak, self.trial.peak_memory_bytes or 0),
            peak_memory_method=self.ledger.method,
        )
