"""Warm subjects timed side by side: ABBA rounds of blocks, until the question is answered or so many."""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count, islice
from typing import Any

from perf.record.runs import Block
from perf.stats.quiet import QuietSpans, comparison_measure, samples
from perf.stats.stats import ratio_of_medians

from .laps import Bound, Clock, Plan
from .watch import Watch, unwatched

# The interval is looked at each time the rounds have grown by an eighth: seldom, as looking often flatters it.
LOOKS = 8
LATE = "the time limit came within the round"
# States in which the hardware slows itself down; a power cap is the normal state of a busy card and is only warned of.
THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown")


def calls_per_block(call_ms: float, block_ms: float) -> int:
    return min(max(math.ceil(block_ms / call_ms), 1), 200)


def settle_calls(calls: int) -> int:
    """Return the untimed calls at a block's head: 1 when calls are short enough for the cache's contents to matter."""
    return 1 if calls >= 4 else 0


def measure_pair(
    bounds: Mapping[str, Bound],
    plan: Plan,
    *,
    calls: int,
    clock: Clock,
    watch: Watch = unwatched,
    on_round: Callable[[int], None] | None = None,
    limit_s: float | None = None,
) -> tuple[tuple[Block, ...], str]:
    """Measure two warm subjects, the reference first, in ABBA rounds until the plan is answered; says why it stopped.

    A throttled block spoils its round. `on_round` is called with the rounds done; `limit_s`: None for the plan's.
    """
    reference, candidate = bounds
    blocks, quiet = list[Block](), QuietSpans(bounds)
    limit_s = plan.time_limit_s if limit_s is None else limit_s
    for latest in _rounds(bounds, calls, clock, watch, on_round, limit_s):
        blocks += latest
        quiet.add(latest[0].round, latest)
        stop = _stop(blocks, quiet, (reference, candidate), plan)
        if stop is not None:
            return tuple(blocks), stop
    return tuple(blocks), "time limit"


def measure_rounds(
    bounds: Mapping[str, Bound],
    rounds: int,
    *,
    calls: int,
    clock: Clock,
    watch: Watch = unwatched,
    on_round: Callable[[int], None] | None = None,
    limit_s: float = math.inf,
) -> tuple[Block, ...]:
    """Measure subjects for so many rounds, forth and back (1 2 3 3 2 1), or fewer within `limit_s` seconds."""
    every = _rounds(bounds, calls, clock, watch, on_round, limit_s)
    return tuple(block for blocks in islice(every, rounds) for block in blocks)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's cycle collector out of the timed calls; collects once before."""
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
    """Collect once and freeze what is left, as later collections of torch's objects take a quarter of a second each."""
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
    calls: int,
    clock: Clock,
    watch: Watch,
    on_round: Callable[[int], None] | None,
    limit_s: float,
) -> Iterator[list[Block]]:
    """Yield the blocks of each round that is expected to end in time; of an unfinished one all are dropped."""
    started, last_s = clock(), 0.0
    with no_garbage_collection():
        for index in count():
            begun = clock()
            if (begun - started) / 1e9 + last_s > limit_s:
                return
            blocks = list[Block]()
            # Forth and back, so that a steady drift cancels; every other round begins at the other end, in fairness.
            names = tuple(bounds) if index % 2 == 0 else tuple(bounds)[::-1]
            for name in names + names[::-1]:
                if (clock() - started) / 1e9 >= limit_s:
                    if blocks:
                        yield [replace(block, dropped=LATE) for block in blocks]
                    return
                blocks.append(_block(bounds[name], name, index, calls, started, clock, watch))
            last_s = (clock() - begun) / 1e9
            if on_round is not None:
                on_round(index + 1)
            yield blocks


def _block(bound: Bound, name: str, index: int, calls: int, started: int, clock: Clock, watch: Watch) -> Block:
    settle = settle_calls(calls)
    if settle:
        bound.laps(settle, clock)
    at_s = (clock() - started) / 1e9
    laps = bound.laps(calls, clock)
    state = watch()
    throttle = [reason for reason in (state.throttle if state else ()) if reason in THROTTLED]
    dropped = f"throttled: {', '.join(throttle)}" if throttle else None
    times: dict[str, Any] = {each.name: getattr(laps, each.name) for each in fields(laps)}
    return Block(round=index, subject=name, at_s=at_s, dropped=dropped, gpu=state, **times)


def _stop(blocks: Sequence[Block], quiet: QuietSpans, subjects: tuple[str, str], plan: Plan) -> str | None:
    """Why to stop now, or None. Width alone decides, never the verdict: stopping on a verdict would favour it."""
    kept = len(quiet.spans)
    if quiet.rounds >= plan.max_rounds:
        return "round limit"
    if kept < plan.min_rounds or kept % max(kept // LOOKS, 1):
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
