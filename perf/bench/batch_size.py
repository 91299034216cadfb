"""Measurement of one batch size within its time limit.

It warms up, times the reference against itself and both subjects side by side, and compares timed with plain calls.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ground.errors import is_out_of_memory
from ground.feeds import Feeds
from ground.quantity import format_number
from perf.parity.structure import StructuralTest
from perf.record.energy import EnergyRun
from perf.record.runs import OUT_OF_TIME, BenchTrial, Row, TimedBlock, name_of_rerun
from perf.stats.quiet import whole_rounds
from perf.timing.laps import WARM_UP_SHARE, Plan, TimeLimit
from perf.timing.rounds import measure_pair, measure_rounds, settle_calls
from perf.timing.watch import Watch

from .budget import TimeAllocation, allocate_time, least_s
from .energy import EnergyMeter
from .opened_subject import CALLS_AROUND, OpenedSubject, repeat_blocks

AMPLE = 1.5  # the advised time limit over the least, for the warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """One batch size to measure within a time limit.

    `subjects` are reference, candidate and, if the plan has an A/A run, a second reference. `before_s` is this batch
    size's share of the time to open them.
    """

    batch: int
    feeds: Feeds
    subjects: Sequence[OpenedSubject]
    plan: Plan
    limit: TimeLimit
    before_s: float
    watch: Watch
    report: Callable[[str], None]
    meter: EnergyMeter | None = None

    def timed(self) -> tuple[Row, list[StructuralTest]]:
        """Measure, and return the row and the structural tests of timed calls; the caller releases the subjects."""
        begun_s, reference = self.limit.spent_s, self.subjects[0]
        self._first_calls()
        if self._is_late:
            return self._out_of_time(), []
        self._warm()
        running = self._running
        if not running:
            return self._row(stop="nothing to measure"), []
        allocation = allocate_time(
            self.plan,
            self.limit.left_s,
            [subject.call_s for subject in running],
            reference_s=None if reference.bound is None else reference.call_s,
            again_s=(self.limit.spent_s - begun_s) / len(running),
        )
        noise, left_out = self._noise_run(allocation)
        blocks, stop = self._side_by_side(allocation)
        measured: dict[str, Any] = {"calls": allocation.calls, "blocks": blocks, "noise_blocks": noise}
        if not whole_rounds(blocks):
            return self._out_of_time(**measured), []
        repeats = self._repeat_blocks(allocation)
        untried = [subject.name for subject in running if self.plan.audit_rounds and subject.name not in repeats]
        left_out = (*left_out, *(f"{name}: no time to try it on varied batches" for name in untried))
        energy = self._energy()
        left_out, energy = ((*left_out, energy), None) if isinstance(energy, str) else (left_out, energy)
        row = self._row(stop=stop, repeat_blocks=repeats, left_out=left_out, energy=energy, **measured)
        return row, [test for subject in self.subjects for test in subject.tests()]

    @property
    def _compared(self) -> Sequence[OpenedSubject]:
        return self.subjects[:2]

    @property
    def _running(self) -> list[OpenedSubject]:
        return [subject for subject in self._compared if subject.bound is not None]

    @property
    def _is_late(self) -> bool:
        running = self._running
        return bool(running) and least_s([subject.fastest_s for subject in running]) > self.limit.left_s

    def _first_calls(self) -> None:
        """Bind and call each subject; call again if the first call, which is slow, would leave no time."""
        self.report("first calls")
        for subject in self._compared:
            subject.first_call(self.feeds, self.batch, self.plan, self.limit)
            for each in self._compared:
                if self._is_late and self.limit.left_s > 0 and len(each.trial.warm_up_samples_ms) == 1:
                    each.warm(self.plan, self.limit, 0.0)
            if self._is_late:
                break

    def _warm(self) -> None:
        running = self._running
        for place, subject in enumerate(running):
            free_s = self.limit.left_s - least_s([each.fastest_s for each in running])
            self._warm_up(subject, free_s / (len(running) - place))

    def _warm_up(self, subject: OpenedSubject, most_s: float) -> None:
        self.report(f"warm-up of {subject.name}")
        limit_s = min(WARM_UP_SHARE * self.limit.limit_s, most_s)
        if limit_s >= subject.fastest_s:
            subject.warm(self.plan, self.limit, limit_s)

    def _noise_run(self, allocation: TimeAllocation) -> tuple[tuple[TimedBlock, ...], tuple[str, ...]]:
        reference = self.subjects[0]
        if not self.plan.noise_rounds or reference.bound is None:
            return (), ()
        if not allocation.noise_rounds:
            return (), (f"no time for the A/A run ({reference.name} against itself); a longer --time-limit has it",)
        again = self.subjects[2]
        kept_s = allocation.audit_s + least_s([subject.call_s for subject in self._running])
        again.first_call(self.feeds, self.batch, self.plan, self.limit)
        if again.bound is not None:
            self._warm_up(again, self.limit.left_s - kept_s - allocation.noise_s)
        if again.bound is None:
            return (), (f"no A/A run: {again.trial.message}",)
        limit_s = min(allocation.noise_limit_s, self.limit.left_s - kept_s)
        pair = {reference.name: reference.bound, again.name: again.bound}
        again.bound = None  # so that it is freed with the pair
        return measure_rounds(pair, allocation.noise_rounds, **self._how(allocation, "against itself", limit_s)), ()

    def _how(self, allocation: TimeAllocation, stage: str, limit_s: float) -> dict[str, Any]:
        return {
            "calls": allocation.calls,
            "clock": self.limit.clock,
            "watch": self.watch,
            "on_round": lambda index: self.report(f"{stage}, round {index}"),
            "limit_s": limit_s,
        }

    def _side_by_side(self, allocation: TimeAllocation) -> tuple[tuple[TimedBlock, ...], str]:
        how = self._how(allocation, "side by side", self.limit.left_s - allocation.audit_s - allocation.plain_s)
        bounds = {subject.name: subject.bound for subject in self._compared if subject.bound is not None}
        if len(bounds) == 2:
            return measure_pair(bounds, self.plan, **how)
        return measure_rounds(bounds, self.plan.min_rounds, **how), "one subject only"

    def _repeat_blocks(self, allocation: TimeAllocation) -> dict[str, tuple[TimedBlock, ...]]:
        repeats: dict[str, tuple[TimedBlock, ...]] = {}
        subjects = self._running if allocation.audit_rounds else []
        for place, subject in enumerate(subjects):
            self.report(f"{subject.name} on varied batches")
            share_s = (self.limit.left_s - allocation.plain_s) / (len(subjects) - place)
            if share_s < CALLS_AROUND * subject.call_s:
                continue
            limit, rounds = TimeLimit(self.limit.clock, share_s), allocation.audit_rounds
            how: dict[str, Any] = {"calls": allocation.calls, "limit": limit, "watch": self.watch}
            try:
                blocks = repeat_blocks(subject.bind, self.feeds, self.batch, rounds, **how)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                repeats[subject.name] = ()  # no memory for so many batches; the other measurements stay
                continue
            if whole_rounds(blocks):
                repeats[subject.name] = blocks
        return repeats

    def _energy(self) -> EnergyRun | str | None:
        """Measure the energy of both subjects and of the reference again, in time of its own."""
        if self.meter is None:
            return None
        bounds = {each.name: (each.bound, each.call_s) for each in self._compared if each.bound is not None}
        reference = self.subjects[0].name
        if reference in bounds:
            bounds = {reference: bounds[reference], name_of_rerun(reference): bounds[reference]} | bounds
        with self.limit.paused():
            return self.meter.measure(bounds, self.batch, self.report)

    def _row(self, *, stop: str, calls: int = 1, **measured: Any) -> Row:
        return Row(
            batch=self.batch,
            trials={subject.name: subject.trial for subject in self._compared},
            calls_per_block=calls,
            settle_calls=settle_calls(calls),
            stop=stop,
            **({"blocks": (), "noise_blocks": ()} | measured),
        )

    def skipped_as_too_slow(self, smaller: Row) -> Row:
        least = least_of(list(smaller.trials.values()))
        assert least is not None, smaller
        needed_s = self.before_s + AMPLE * least * self.batch / smaller.batch
        return self._late_row(f"going by batch {smaller.batch} {self._advice(needed_s)}")

    def _out_of_time(self, **measured: Any) -> Row:
        least = least_of([subject.trial for subject in self._compared])
        spent_s = self.limit.spent_s
        if least is not None:
            message = self._advice(self.before_s + spent_s + AMPLE * least)
        else:
            message = f"binding it and its first call took {format_number(spent_s, 2)} s of "
            message += f"{format_number(self.limit.limit_s, 2)}; give a longer --time-limit"
        return self._late_row(message, **measured)

    def _advice(self, needed_s: float) -> str:
        """Return a sentence with the advised time limit, rounded up to two digits."""
        step = 10.0 ** (math.floor(math.log10(needed_s)) - 1)
        needed = f"{step * math.ceil(needed_s / step):g}"
        return f"it takes about {needed} s, the limit is {self.plan.time_limit_s:g} s; give --time-limit {needed}"

    def _late_row(self, message: str, **measured: Any) -> Row:
        row = self._row(stop=OUT_OF_TIME, **measured)
        late = {
            name: replace(trial, status=OUT_OF_TIME, message=message) if trial.status == "ok" else trial
            for name, trial in row.trials.items()
        }
        return replace(row, trials=late)


def least_of(trials: Sequence[BenchTrial]) -> float | None:
    """Return the least time for an interval, in s, by fastest calls; None unless each called subject has two calls."""
    called = [trial.warm_up_samples_ms for trial in trials if trial.warm_up_samples_ms]
    if not called or min(map(len, called)) < 2:
        return None
    calls_s = [min(samples_ms) / 1e3 for samples_ms in called]
    uncalled = sum(trial.status in ("ok", OUT_OF_TIME) and not trial.warm_up_samples_ms for trial in trials)
    return least_s(calls_s + calls_s[-1:] * uncalled)
