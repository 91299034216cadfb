"""One batch size within its time limit: bound, warmed up, against itself, side by side, and held against plain calls.

The first calls tell whether there is time for an interval; where there isn't, no more are made.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ground.errors import is_out_of_memory
from ground.feeds import Feeds
from perf.parity.structure import StructuralTest
from perf.record.runs import OUT_OF_TIME, BenchTrial, Block, Row
from perf.stats.quiet import whole_rounds
from perf.timing.laps import WARM_UP_SHARE, Bound, Plan, TimeLimit, limit_from_now
from perf.timing.rounds import measure_pair, measure_rounds, settle_calls
from perf.timing.watch import Watch

from .budget import TimeAllocation, allocated, least_s
from .opened_subject import CALLS_AROUND, BoundSubject, OpenedSubject, repeat_blocks

AMPLE = 1.5  # times the least is what is advised: some of it is for the warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What is measured, and the time that there is for it.

    `stations` are reference and candidate, and a second instance of the reference where the plan has an A/A run;
    `before_s` is the part of opening them that falls to this batch size.
    """

    batch: int
    feeds: Feeds
    subjects: Sequence[OpenedSubject]
    plan: Plan
    limit: TimeLimit
    before_s: float
    watch: Watch
    report: Callable[[str], None]

    def timed(self) -> tuple[Row, list[StructuralTest]]:
        """The row, and what was timed held against plain calls. Nothing stays bound."""
        try:
            return self._timed()
        finally:
            for subject in self.subjects:
                subject.release()

    def _timed(self) -> tuple[Row, list[StructuralTest]]:
        begun_s, ready = self.limit.spent_s, self._first_calls()
        if self._is_late(ready):
            return self._out_of_time(ready), []
        ready = self._warm(ready)
        bounds = _bounds(ready)
        if not bounds:
            return self._row(ready, stop="nothing to measure"), []
        calls_s = {name: ready[name].call_s for name in bounds}
        again_s, reference_s = (self.limit.spent_s - begun_s) / len(bounds), calls_s.get(self.subjects[0].name)
        every = list(calls_s.values())
        allocation = allocated(self.plan, self.limit.left_s, every, reference_s=reference_s, again_s=again_s)
        noise, left_out = self._noise_run(ready, allocation)
        blocks, stop = self._side_by_side(bounds, allocation)
        measured: dict[str, Any] = {"calls": allocation.calls, "blocks": blocks, "noise_blocks": noise}
        if not whole_rounds(blocks):
            return self._out_of_time(ready, **measured), []
        repeats = self._repeat_blocks(calls_s, allocation)
        untried = [name for name in bounds if self.plan.audit_rounds and name not in repeats]
        left_out = (*left_out, *(f"{name}: no time to try it on varied batches" for name in untried))
        row = self._row(ready, stop=stop, repeat_blocks=repeats, left_out=left_out, **measured)
        return row, [test for subject in self.subjects for test in subject.tests()]

    @property
    def _compared(self) -> Sequence[OpenedSubject]:
        return self.subjects[:2]

    def _first_calls(self) -> dict[str, BoundSubject]:
        """Each bound and called, and called again where that leaves no time: a first call does more than later ones.
        Where there is no time for the reference the candidate is left alone.
        """
        ready: dict[str, BoundSubject] = {}
        self.report("first calls")
        for subject in self._compared:
            ready[subject.name] = subject.first_call(self.feeds, self.batch, self.plan, self.limit)
            for each in self._compared[: len(ready)]:
                if self._is_late(ready) and self.limit.left_s > 0 and ready[each.name].calls == 1:
                    ready[each.name] = each.warmed(ready[each.name], self.plan, self.limit, 0.0)
            if self._is_late(ready):
                break
        return ready

    def _is_late(self, ready: Mapping[str, BoundSubject]) -> bool:
        bounds = _bounds(ready)
        return bool(bounds) and least_s([ready[name].fastest_s for name in bounds]) > self.limit.left_s

    def _warm(self, ready: Mapping[str, BoundSubject]) -> dict[str, BoundSubject]:
        """Each in its share of the time; what an interval takes stays free."""
        warm, bounds = dict(ready), _bounds(ready)
        subjects = [subject for subject in self._compared if subject.name in bounds]
        for place, subject in enumerate(subjects):
            free_s = self.limit.left_s - least_s([warm[name].fastest_s for name in bounds])
            warm[subject.name] = self._warmed(subject, warm[subject.name], free_s / (len(subjects) - place))
        return warm

    def _warmed(self, subject: OpenedSubject, ready: BoundSubject, most_s: float) -> BoundSubject:
        self.report(f"warm-up of {subject.name}")
        limit_s = min(WARM_UP_SHARE * self.limit.limit_s, most_s)
        return ready if limit_s < ready.fastest_s else subject.warmed(ready, self.plan, self.limit, limit_s)

    def _noise_run(
        self, ready: Mapping[str, BoundSubject], allocation: TimeAllocation
    ) -> tuple[tuple[Block, ...], tuple[str, ...]]:
        """The A/A run, or why there is none."""
        bounds, reference = _bounds(ready), self.subjects[0].name
        if not self.plan.noise_rounds or reference not in bounds:
            return (), ()
        if not allocation.noise_rounds:
            return (), (f"no time for the A/A run ({reference} against itself); a longer --time-limit has it",)
        again, kept_s = self.subjects[2], allocation.audit_s + least_s([ready[name].call_s for name in bounds])
        other = again.first_call(self.feeds, self.batch, self.plan, self.limit)
        if other.bound is not None:
            other = self._warmed(again, other, self.limit.left_s - kept_s - allocation.noise_s)
        if other.bound is None:
            return (), (f"no A/A run: {other.trial.message}",)
        limit_s = min(allocation.noise_limit_s, self.limit.left_s - kept_s)
        how = self._how(allocation, "against itself", limit_s)
        pair = {reference: bounds[reference], again.name: other.bound}
        return measure_rounds(pair, allocation.noise_rounds, **how), ()

    def _how(self, allocation: TimeAllocation, stage: str, limit_s: float) -> dict[str, Any]:
        return {
            "calls": allocation.calls,
            "clock": self.limit.clock,
            "watch": self.watch,
            "on_round": lambda index: self.report(f"{stage}, round {index}"),
            "limit_s": limit_s,
        }

    def _side_by_side(self, bounds: Mapping[str, Bound], allocation: TimeAllocation) -> tuple[tuple[Block, ...], str]:
        """The comparison, or of one alone its times."""
        how = self._how(allocation, "side by side", self.limit.left_s - allocation.audit_s - allocation.plain_s)
        if len(bounds) == 2:
            return measure_pair(bounds, self.plan, **how)
        return measure_rounds(bounds, self.plan.min_rounds, **how), "one subject only"

    def _repeat_blocks(self, calls_s: Mapping[str, float], allocation: TimeAllocation) -> dict[str, tuple[Block, ...]]:
        """Each on one batch against varied ones, the time shared by both; left out where it isn't enough."""
        repeats: dict[str, tuple[Block, ...]] = {}
        subjects = [subject for subject in self._compared if subject.name in calls_s]
        for place, subject in enumerate(subjects if allocation.audit_rounds else ()):
            self.report(f"{subject.name} on varied batches")
            share_s = (self.limit.left_s - allocation.plain_s) / (len(subjects) - place)
            if share_s < CALLS_AROUND * calls_s[subject.name]:
                continue
            limit, rounds = limit_from_now(self.limit.clock, share_s), allocation.audit_rounds
            how: dict[str, Any] = {"calls": allocation.calls, "limit": limit, "watch": self.watch}
            try:
                blocks = repeat_blocks(subject.bind, self.feeds, self.batch, rounds, **how)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                repeats[subject.name] = ()  # no memory for so many batches at once: what was measured before stays
                continue
            if whole_rounds(blocks):
                repeats[subject.name] = blocks
        return repeats

    def _row(self, ready: Mapping[str, BoundSubject], *, stop: str, calls: int = 1, **measured: Any) -> Row:
        return Row(
            batch=self.batch,
            trials={subject.name: ready[subject.name].trial for subject in self._compared},
            calls_per_block=calls,
            settle_calls=settle_calls(calls),
            stop=stop,
            **({"blocks": (), "noise_blocks": ()} | measured),
        )

    def skipped_as_too_slow(self, smaller: Row) -> Row:
        """Not tried where a smaller batch size takes too long."""
        least = least_of(list(smaller.trials.values()))
        assert least is not None, smaller
        needed_s = self.before_s + AMPLE * least * self.batch / smaller.batch
        return self._late_row({}, f"going by batch {smaller.batch} {self._advice(needed_s)}")

    def _out_of_time(self, ready: Mapping[str, BoundSubject], **measured: Any) -> Row:
        least = least_of([ready.get(subject.name, BoundSubject()).trial for subject in self._compared])
        spent_s = self.limit.spent_s
        if least is not None:
            message = self._advice(self.before_s + spent_s + AMPLE * least)
        else:
            message = f"binding it and its first call took {spent_s:.2g} s of {self.limit.limit_s:.2g}; give a longer "
            message += "--time-limit"
        return self._late_row(ready, message, **measured)

    def _advice(self, needed_s: float) -> str:
        """Rounded up to two digits."""
        step = 10.0 ** (math.floor(math.log10(needed_s)) - 1)
        needed = f"{step * math.ceil(needed_s / step):g}"
        return f"it takes about {needed} s, the limit is {self.plan.time_limit_s:g} s; give --time-limit {needed}"

    def _late_row(self, ready: Mapping[str, BoundSubject], message: str, **measured: Any) -> Row:
        every = {subject.name: ready.get(subject.name, BoundSubject()) for subject in self._compared}
        late = {
            name: replace(one, trial=replace(one.trial, status=OUT_OF_TIME, message=message))
            for name, one in every.items()
            if one.trial.status == "ok"
        }
        return self._row(every | late, stop=OUT_OF_TIME, **measured)


def least_of(trials: Sequence[BenchTrial]) -> float | None:
    """What an interval takes by the fastest calls of both, in seconds; one that wasn't called passes for as slow as the
    other. None where first calls alone are known, which tell too little.
    """
    called = [trial.warm_up_samples_ms for trial in trials if trial.warm_up_samples_ms]
    if not called or min(map(len, called)) < 2:
        return None
    calls_s = [min(samples_ms) / 1e3 for samples_ms in called]
    uncalled = sum(trial.status in ("ok", OUT_OF_TIME) and not trial.warm_up_samples_ms for trial in trials)
    return least_s(calls_s + calls_s[-1:] * uncalled)


def _bounds(ready: Mapping[str, BoundSubject]) -> dict[str, Bound]:
    """Of those that can run."""
    return {name: one.bound for name, one in ready.items() if one.bound is not None}
