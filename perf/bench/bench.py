"""Measurement of a reference and a candidate over a sweep of batch sizes, side by side in one process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from time import perf_counter_ns

from ground.errors import BadInput, Missing
from ground.feeds import Feeds
from ground.quantity import format_number
from perf.parity.structure import StructuralTest
from perf.record.runs import ENERGY, OUT_OF_TIME, Bench, Flat, Row, Scalar, SubjectRecord, name_of_rerun
from perf.runners.protocol import Ledger, Runner
from perf.stats.stability import find_warnings
from perf.timing.energy import UNMEASURED, NoSensor
from perf.timing.laps import Clock, Plan, TimeLimit
from perf.timing.rounds import quick_garbage_collection
from perf.timing.watch import Watch, environment, unwatched

from .batch_size import BatchSize, least_of
from .energy import EnergyMeter
from .opened_subject import OpenedSubject

Progress = Callable[[float, str], None]
OPENING_SHARE = 1 / 2  # of the time limit at most counts for opening; a warning is given if it takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSubject(SubjectRecord):
    """A subject as recorded, and a function that makes its runner, not yet entered."""

    describe: Flat = field(default_factory=dict)
    open: Callable[[], Runner]

    def described(self, describe: Flat) -> SubjectRecord:
        values = {each.name: getattr(self, each.name) for each in fields(SubjectRecord)}
        return SubjectRecord(**values | {"describe": dict(describe)})


def bench_subjects(
    subjects: tuple[BenchSubject, BenchSubject],
    feeds: Feeds,
    batches: Sequence[int],
    plan: Plan,
    *,
    streams: int = 1,
    flush_l2: bool = False,
    described: Flat | None = None,
    command: Sequence[str] = (),
    clock: Clock = perf_counter_ns,
    watch: Watch = unwatched,
    meter: EnergyMeter | NoSensor = UNMEASURED,
    progress: Progress | None = None,
    made_s: float = 0.0,
) -> Bench:
    """Time the first subject against the second, and the first against itself, at every batch size.

    A batch takes the first rows of `feeds` [N, ...], again from the first if N is smaller; if there is one input, the
    two subjects may name it differently. Each subject has `streams` instances called at once; above 1 only throughput
    is measured. The time to open the subjects, and `made_s` spent to make them, counts in equal shares for the batch
    sizes to come; no batch size takes time from another. A batch size that couldn't be measured in its time stays as a
    row with the reason. `flush_l2`, `command` and `described` (the machine, None for this one) are only recorded.
    `watch` is called around blocks, `progress` with the share done and the stage. `meter` measures energy, in time of
    its own.

    Raises BadInput for subjects, feeds, batch sizes or streams that are not valid, and Missing if a runner lacks its
    device, provider or package, or if nothing could be measured at any batch size.
    """
    _require_sweep(subjects, batches, streams)
    reference, candidate = subjects
    names = [reference.name, candidate.name, *([name_of_rerun(reference.name)] if plan.noise_rounds else [])]
    rows, tests = list[Row](), list[StructuralTest]()
    with ExitStack() as stack:
        began = clock()
        opened = [
            _open_subject(subject, name, streams, stack)
            for subject, name in zip((*subjects, reference), names, strict=False)
        ]
        stack.enter_context(quick_garbage_collection())
        opening_s = owed_s = made_s + (clock() - began) / 1e9
        for index, batch in enumerate(batches):
            before_s = owed_s / (len(batches) - index)
            limit = TimeLimit(clock, plan.time_limit_s - min(before_s, OPENING_SHARE * plan.time_limit_s))
            size = BatchSize(
                batch=batch,
                feeds=feeds,
                subjects=opened,
                plan=plan,
                limit=limit,
                before_s=before_s,
                watch=watch,
                meter=meter if isinstance(meter, EnergyMeter) else None,
                report=_stage_progress(progress, index, len(batches), f"batch {batch}", limit),
            )
            late = [row for row in rows if row.batch < batch and row.stop == OUT_OF_TIME]
            late = [row for row in late if least_of([*row.trials.values()])]
            slow = max(late, key=lambda row: row.batch, default=None)  # a larger batch size is slower still
            try:
                row, own = size.timed() if slow is None else (size.skipped_as_too_slow(slow), [])
            finally:
                for subject in opened:
                    subject.release()
            rows.append(row)
            tests += own
            # Time left of this limit pays for the opening; time beyond it is not taken from other batch sizes.
            owed_s -= min(owed_s, plan.time_limit_s - min(limit.spent_s, limit.limit_s))
        _require_measured(rows)
        descriptions = [subject.runners[0].describe() for subject in opened]
    opening = (
        f"exporting and loading took {format_number(opening_s, 2)} s, and --time-limit {plan.time_limit_s:g} allows "
        f"{plan.time_limit_s * len(batches):g} s for all; each batch size still had half of its own limit"
    )
    settings: dict[str, Scalar] = {
        **asdict(plan),
        "warm_up_rule": plan.warm_up_rule,
        "order": "ABBA BAAB",
        "streams": streams,
        "flush_l2": flush_l2,
        ENERGY: meter.sensor.name if isinstance(meter, EnergyMeter) else str(meter),
        "energy_s": meter.limit_s if isinstance(meter, EnergyMeter) else 0.0,
    }
    return Bench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        environment=environment() if described is None else described,
        settings=settings,
        subjects=(reference.described(descriptions[0]), candidate.described(descriptions[1])),
        rows=tuple(rows),
        warnings=(
            # Timed calls must give the same outputs as plain calls, and so as `verify`.
            *(f"{test.candidate}: {test.reason}" for test in tests if test.status == "FAIL"),
            *[opening] * (opening_s > OPENING_SHARE * plan.time_limit_s * len(batches)),
            *find_warnings(rows),
        ),
    )


def _require_sweep(subjects: tuple[BenchSubject, BenchSubject], batches: Sequence[int], streams: int) -> None:
    if subjects[0].name == subjects[1].name:
        raise BadInput(f"the two subjects need different names, both are {subjects[0].name!r}")
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise BadInput(f"batch sizes: at least one, each once, all positive; got {list(batches)}")
    if streams < 1:
        raise BadInput(f"streams: at least 1, got {streams}")


def _require_measured(rows: Sequence[Row]) -> None:
    """Raise Missing if no batch size has a time, or if a subject failed at every one."""
    for name in rows[0].trials:
        trials = {row.batch: row.trials[name] for row in rows}
        failures = "; ".join(f"batch {batch}: {trial.message}" for batch, trial in trials.items())
        if all(trial.status == "failed" for trial in trials.values()):
            raise Missing(f"{name} failed at every batch size, so there is nothing to compare: {failures}")
        if not any(row.blocks for row in rows) and all(trial.status in ("oom", "failed") for trial in trials.values()):
            raise Missing(f"nothing could be measured, {name} at no batch size: {failures}; ask for smaller --batch")


def _open_subject(subject: BenchSubject, name: str, streams: int, stack: ExitStack) -> OpenedSubject:
    runners = tuple(subject.open() for _ in range(streams))
    ledger = Ledger(runners[0].gauge())
    ledger.phase(lambda: [stack.enter_context(runner) for runner in runners])
    pool = stack.enter_context(ThreadPoolExecutor(streams)) if streams > 1 else None
    return OpenedSubject(name, runners, ledger, pool)


def _stage_progress(
    progress: Progress | None, index: int, count: int, stage: str, limit: TimeLimit
) -> Callable[[str], None]:

    def say(text: str) -> None:
        if progress is not None:
            progress((index + min(limit.spent_s / limit.limit_s, 1.0)) / count, f"{stage}: {text}")

    return say
