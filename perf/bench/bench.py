"""Measure a reference and a candidate over a sweep of batch sizes, in one process, side by side."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from time import perf_counter_ns

from ground.errors import BadInput, Missing, is_out_of_memory
from ground.feeds import Feeds, batch_of, feeds_of_ports
from perf.record.runs import Bench, BenchTrial, Block, Flat, Row, Scalar, SubjectRecord
from perf.runners.memory import Ledger
from perf.runners.protocol import ParallelStreams, Runner
from perf.stats.stability import warnings_of
from perf.timing.environment import environment
from perf.timing.laps import Bound, Clock, Plan, WarmUp, warm_up
from perf.timing.rounds import calls_per_block, measure_pair, measure_rounds, settle_calls
from perf.timing.watch import Watch, unwatched

from .varied import repeat_blocks

Progress = Callable[[float, str], None]
AGAIN = " again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One of the two: a name, a function that makes a runner not yet entered, and what is known about its size."""

    name: str
    open: Callable[[], Runner]
    macs: int | None = None
    params: int | None = None
    size_bytes: int | None = None
    sha256: str | None = None
    fused_attention: int | None = None
    sparse_layers: int | None = None
    plan_bytes: int | None = None
    device_memory: Mapping[str, int] | None = None

    def described(self, describe: Flat) -> SubjectRecord:
        return SubjectRecord(
            name=self.name,
            describe=dict(describe),
            macs=self.macs,
            params=self.params,
            size_bytes=self.size_bytes,
            sha256=self.sha256,
            fused_attention=self.fused_attention,
            sparse_layers=self.sparse_layers,
            plan_bytes=self.plan_bytes,
            device_memory=self.device_memory,
        )


@dataclass(frozen=True, slots=True)
class Station:
    """An opened subject: its runners (as many as streams) and the memory booked on them."""

    name: str
    runners: tuple[Runner, ...]
    ledger: Ledger | None
    pool: ThreadPoolExecutor | None

    def bind(self, feeds: Feeds) -> Bound:
        bounds = tuple(runner.bind(feeds_of_ports(feeds, runner.inputs)) for runner in self.runners)
        return bounds[0] if self.pool is None else ParallelStreams(bounds, self.pool)


def bench(
    subjects: tuple[Subject, Subject],
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
    progress: Progress | None = None,
) -> Bench:
    """Time the first subject against the second, and the first against itself, at every batch size.

    Args:
        feeds: by input, [N, ...]; a batch takes the first of N, over again when N is smaller. Where there is one
            input, the two subjects may call it by different names.
        streams: instances of each subject called at once; above 1 only throughput is measured.
        flush_l2: recorded only; the runners do it.
        described: the machine; None looks.
        watch: asked between blocks, see perf.timing.watch.watching.
        progress: called with the share done and what is being done.

    Raises:
        BadInput: the subjects, feeds, batch sizes or streams make no measurement.
        Missing: a runner lacks its device, provider or package, or nothing could be measured at any batch size.
    """
    _require_sweep(subjects, batches, streams)
    reference, candidate = subjects
    rows: list[Row] = []
    with ExitStack() as stack:
        stations = {subject.name: _opened(subject, subject.name, streams, stack) for subject in subjects}
        if plan.noise_rounds:
            again = reference.name + AGAIN
            stations[again] = _opened(reference, again, streams, stack)
        for index, batch in enumerate(batches):
            say = _within(progress, index, len(batches), f"batch {batch}")
            rows.append(_row(stations, feeds, batch, plan, clock, watch, say))
        _require_measured(rows)
        descriptions = [stations[subject.name].runners[0].describe() for subject in subjects]
    settings: dict[str, Scalar] = {
        **asdict(plan),
        "warm_up_rule": plan.warm_up_rule,
        "order": "ABBA BAAB",
        "streams": streams,
        "flush_l2": flush_l2,
    }
    return Bench(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=tuple(command),
        environment=environment() if described is None else described,
        settings=settings,
        subjects=(reference.described(descriptions[0]), candidate.described(descriptions[1])),
        rows=tuple(rows),
        warnings=tuple(warnings_of(rows)),
    )


def _require_sweep(subjects: tuple[Subject, Subject], batches: Sequence[int], streams: int) -> None:
    if subjects[0].name == subjects[1].name:
        raise BadInput(f"the two subjects need different names, both are {subjects[0].name!r}")
    if not batches or min(batches) < 1 or len(set(batches)) != len(batches):
        raise BadInput(f"batch sizes: at least one, each once, all positive; got {list(batches)}")
    if streams < 1:
        raise BadInput(f"streams: at least 1, got {streams}")


def _require_measured(rows: Sequence[Row]) -> None:
    """Raise Missing when no batch size has a time, or when one of the two failed at every one; a batch size that one of
    them has no memory for is a finding.
    """
    for name in rows[0].trials:
        trials = {row.batch: row.trials[name] for row in rows}
        fared = "; ".join(f"batch {batch}: {trial.message}" for batch, trial in trials.items())
        if all(trial.status == "failed" for trial in trials.values()):
            raise Missing(f"{name} failed at every batch size, so there is nothing to compare: {fared}")
        if not any(row.blocks for row in rows) and all(trial.status != "ok" for trial in trials.values()):
            raise Missing(f"nothing could be measured, {name} at no batch size: {fared}; ask for smaller --batch")


def _opened(subject: Subject, name: str, streams: int, stack: ExitStack) -> Station:
    runners = tuple(subject.open() for _ in range(streams))
    gauge = runners[0].gauge()
    ledger = None if gauge is None else Ledger(gauge)

    def enter() -> None:
        for runner in runners:
            stack.enter_context(runner)

    if ledger is None:
        enter()
    else:
        ledger.phase(enter)
    pool = stack.enter_context(ThreadPoolExecutor(streams)) if streams > 1 else None
    return Station(name, runners, ledger, pool)


def _row(
    stations: dict[str, Station], feeds: Feeds, batch: int, plan: Plan, clock: Clock, watch: Watch, say: Progress
) -> Row:
    reference, candidate = tuple(stations)[:2]
    again = reference + AGAIN
    say(0.0, "warm-up")
    ready = {name: _prepared(station, feeds, batch, plan, clock) for name, station in stations.items()}
    bounds = {name: one.bound for name, one in ready.items() if one.bound is not None}
    call_ms = min((one.call_ms for one in ready.values() if one.bound is not None), default=plan.block_ms)
    calls = calls_per_block(call_ms, plan.block_ms)

    noise: tuple[Block, ...] = ()
    if reference in bounds and again in bounds:
        pair = {reference: bounds[reference], again: bounds[again]}
        counted = _counted(say, plan.noise_rounds)
        noise = measure_rounds(pair, plan.noise_rounds, calls=calls, clock=clock, watch=watch, on_round=counted)
    alive = {name: bounds[name] for name in (reference, candidate) if name in bounds}
    blocks: tuple[Block, ...] = ()
    stop = "nothing to measure"
    if len(alive) == 2:
        timed = _timed(say, clock, plan.time_limit_s)
        blocks, stop = measure_pair(alive, plan, calls=calls, clock=clock, watch=watch, on_round=timed)
    elif alive:
        blocks = measure_rounds(alive, plan.min_rounds, calls=calls, clock=clock, watch=watch)
        stop = "one subject only"
    audited = (reference, candidate) if plan.audit_rounds else ()
    repeats = {
        name: _repeats(stations[name], feeds, batch, plan, calls, clock, watch) for name in audited if name in bounds
    }
    return Row(
        batch=batch,
        trials={name: ready[name].trial for name in (reference, candidate)},
        calls_per_block=calls,
        settle_calls=settle_calls(calls),
        stop=stop,
        blocks=blocks,
        noise_blocks=noise,
        repeat_blocks=repeats,
    )


def _repeats(
    station: Station, feeds: Feeds, batch: int, plan: Plan, calls: int, clock: Clock, watch: Watch
) -> tuple[Block, ...]:
    """None where there is no memory for so many batches at once: what was measured before stays."""
    try:
        return repeat_blocks(station.bind, feeds, batch, plan, calls=calls, clock=clock, watch=watch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    trial: BenchTrial
    bound: Bound | None = None
    call_ms: float = math.inf


def _prepared(station: Station, feeds: Feeds, batch: int, plan: Plan, clock: Clock) -> _Prepared:
    """Gather the batch, bind, warm up; to run out of memory or fail is a finding about it, not the sweep's end."""

    def work() -> tuple[Bound, WarmUp]:
        bound = station.bind(batch_of(feeds, batch))
        return bound, warm_up(bound, plan, clock)

    ledger = station.ledger
    try:
        (bound, warmed), peak = (work(), None) if ledger is None else ledger.phase(work)
    except (BadInput, Missing):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:500]
        return _Prepared(trial=BenchTrial(status="oom" if is_out_of_memory(error) else "failed", message=message))
    trial = BenchTrial(
        status="ok",
        warm_up_samples_ms=warmed.samples_ms,
        warm_up_flat=warmed.flat,
        peak_memory_bytes=peak,
        peak_memory_method=None if ledger is None else ledger.gauge.method,
    )
    return _Prepared(trial=trial, bound=bound, call_ms=warmed.call_ms())


def _within(progress: Progress | None, index: int, count: int, what: str) -> Progress:
    """Progress inside one of `count` equal parts."""

    def say(share: float, text: str) -> None:
        if progress is not None:
            progress((index + share) / count, f"{what}: {text}")

    return say


def _counted(say: Progress, rounds: int) -> Callable[[int], None]:
    """Progress of the A/A run: from a tenth to three tenths of a row."""
    return lambda done: say(0.1 + 0.2 * done / rounds, f"against itself, round {done}")


def _timed(say: Progress, clock: Clock, limit_s: float) -> Callable[[int], None]:
    """Progress of the comparison by the clock, since how many rounds will do is not known beforehand."""
    started = clock()
    return lambda done: say(0.3 + 0.7 * min((clock() - started) / 1e9 / limit_s, 1.0), f"side by side, round {done}")
