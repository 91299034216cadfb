"""Timing of warm subjects side by side, in ABBA rounds of blocks."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count, islice
from typing import Any, NotRequired, TypedDict, Unpack

from perf.record.runs import TimedBlock
from perf.stats.quiet import QuietSpans, comparison_measure, samples
from perf.stats.stats import ratio_of_medians

from .laps import Bound, Clock, Plan
from .watch import Watch, unwatched

GROWTH = 1.25  # of rounds between two tests of the interval; frequent tests would end at intervals that chance narrowed
LATE = "the time limit came within the round"


def calls_per_block(call_ms: float, block_ms: float) -> int:
    return min(max(math.ceil(block_ms / call_ms), 1), 200)


def settle_calls(calls: int) -> int:
    """Return the number of untimed calls before a block: 1 if calls are so short that cached data matters."""
    return 1 if calls >= 4 else 0


class RoundOptions(TypedDict):
    """Options of rounds: calls per block, clock, watch, and a function called with the number of rounds done."""

    calls: int
    clock: Clock
    watch: NotRequired[Watch]
    on_round: NotRequired[Callable[[int], None] | None]


def measure_pair(
    bounds: Mapping[str, Bound], plan: Plan, *, limit_s: float | None = None, **how: Unpack[RoundOptions]
) -> tuple[tuple[TimedBlock, ...], str]:
    """Measure two warm subjects, the reference first, in ABBA rounds, and return the blocks and why it stopped.

    A round with a throttled block doesn't count. `limit_s` is the plan's if None.
    """
    reference, candidate = bounds
    blocks, quiet = list[TimedBlock](), QuietSpans(bounds)
    limit_s = plan.time_limit_s if limit_s is None else limit_s
    for done, latest in enumerate(_rounds(bounds, limit_s, **how), 1):
        blocks += latest
        if not any(block.dropped or block.throttled for block in latest):
            quiet.add(latest[0].round, latest)
        stop = _stop_reason(blocks, done, len(quiet.spans), (reference, candidate), plan)
        if stop is not None:
            return tuple(blocks), stop
    return tuple(blocks), "time limit"


def measure_rounds(
    bounds: Mapping[str, Bound], rounds: int, *, limit_s: float = math.inf, **how: Unpack[RoundOptions]
) -> tuple[TimedBlock, ...]:
    """Measure subjects for `rounds` rounds, forth and back (1 2 3 3 2 1), or fewer within `limit_s` seconds."""
    return tuple(block for blocks in islice(_rounds(bounds, limit_s, **how), rounds) for block in blocks)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable Python's cycle collector during the body, after one collection."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def quick_garbage_collection() -> Iterator[None]:
    """Freeze all objects during the body, because each collection of torch's objects takes a quarter of a second."""
    gc.collect()
    frozen_by_others = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_others:
            gc.unfreeze()


def _rounds(
    bounds: Mapping[str, Bound],
    limit_s: float,
    *,
    calls: int,
    clock: Clock,
    watch: Watch = unwatched,
    on_round: Callable[[int], None] | None = None,
) -> Iterator[list[TimedBlock]]:
    """Yield the blocks of each round that is expected to end in time; those of an unfinished one are marked dropped."""
    started, last_s = clock(), 0.0
    with no_garbage_collection():
        for index in count():
            begun = clock()
            if (begun - started) / 1e9 + last_s > limit_s:
                return
            blocks = list[TimedBlock]()
            # Forth and back, so that a steady drift cancels; every other round begins with the other subject.
            names = tuple(bounds) if index % 2 == 0 else tuple(bounds)[::-1]
            for name in names + names[::-1]:
                if (clock() - started) / 1e9 >= limit_s:
                    if blocks:
                        yield [replace(block, dropped=LATE) for block in blocks]
                    return
                blocks.append(_measure_block(bounds[name], name, index, calls, started, clock, watch))
            last_s = (clock() - begun) / 1e9
            if on_round is not None:
                on_round(index + 1)
            yield blocks


def _measure_block(
    bound: Bound, name: str, index: int, calls: int, started: int, clock: Clock, watch: Watch
) -> TimedBlock:
    settle = settle_calls(calls)
    if settle:
        bound.laps(settle, clock)
    at_s = (clock() - started) / 1e9
    before = watch()
    laps = bound.laps(calls, clock)
    state = watch().since(before)
    times: dict[str, Any] = {each.name: getattr(laps, each.name) for each in fields(laps)}
    return TimedBlock(round=index, subject=name, at_s=at_s, gpu=state.gpu, cpu=state.cpu, **times)


def is_test_due(rounds: int, least: int) -> bool:
    """Return whether the interval is tested at this number of rounds: at `least`, and at each GROWTH of it."""
    due = least
    while due < rounds:
        due = math.ceil(due * GROWTH)
    return due == rounds


def _stop_reason(
    blocks: Sequence[TimedBlock], done: int, kept: int, subjects: tuple[str, str], plan: Plan
) -> str | None:
    """Return the reason to stop, or None; only the interval's width decides, as stopping on a verdict favours it.

    `done` rounds have ended, `kept` quiet spans count.
    """
    if done >= plan.max_rounds:
        return "round limit"
    if not is_test_due(kept, plan.min_rounds):
        return None
    measure = comparison_measure(blocks)
    ratio = ratio_of_medians(
        samples(blocks, subjects[0], measure),
        samples(blocks, subjects[1], measure),
        confidence=plan.confidence,
        draws=plan.draws,
        seed=plan.seed,
    )
    return "narrow" if ratio.half_width_rel <= plan.half_width_rel else None
