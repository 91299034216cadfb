"""How two things are timed side by side: warm-up until flat, then ABBA rounds until the question is answered.

Nothing here knows a model or a machine. What is timed comes as a `Bound`, the clock as a function of no arguments that
returns nanoseconds, the state of the machine as a `Watch`; tests hand in fakes.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Protocol

from ground.errors import BadInput
from perf.record.runs import Block
from perf.stats.quiet import comparison_measure, quiet_spans, samples
from perf.stats.stats import MIN_ROUNDS, ratio_of_medians, trend, trend_score

from .watch import Watch, unwatched

Clock = Callable[[], int]
LOOKS = (
    8  # the interval is looked at each time the rounds have grown by an eighth: seldom, as looking often flatters it
)
# States in which the hardware slows itself down; a power cap is the normal state of a busy card and is only warned of.
THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Laps:
    """Consecutive calls: one time per call where calls can be told apart, and the wall time of all.

    `compute_ms` is device time between events, or the wall time of the call on a CPU; `end_to_end_ms` adds the copies
    to and from the device, None when there are none to add. `enqueue_ms` is how long the host took to issue the calls;
    `lost_ms` what the threads of each call waited for a CPU, None where the system doesn't tell.
    """

    calls: int
    wall_ms: float
    compute_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...] | None = None
    enqueue_ms: float | None = None
    lost_ms: tuple[float, ...] | None = None


class Bound(Protocol):
    """A runner with one batch in place: fixed shapes, fixed addresses, ready to be called again and again."""

    def laps(self, calls: int, clock: Clock) -> Laps: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rules of a measurement; they are recorded with it.

    `half_width_rel` is the question: rounds are added until the interval of the speed-up is within this share of its
    value on either side (a third of a gate's margin is a good choice), or `time_limit_s` per batch size has passed.
    Blocks are short, so that the two subjects of a round meet the same load; simulated at a load that comes and goes,
    25 ms estimate the ratio with a third less spread than 100 ms do in the same time, and from 16 rounds on the 95 %
    interval covered the true ratio in 94 % of 240 measurements.
    """

    block_ms: float = 25.0
    min_rounds: int = 16
    max_rounds: int = 500
    time_limit_s: float = 20.0
    half_width_rel: float = 0.01
    noise_rounds: int = 8
    warm_up_window: int = 20
    warm_up_min_s: float = 0.2
    warm_up_limit_s: float = 10.0
    warm_up_tolerance_rel: float = 0.02
    confidence: float = 0.95
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not MIN_ROUNDS <= self.min_rounds <= self.max_rounds:
            raise BadInput(f"rounds: an interval needs {MIN_ROUNDS}, got {self.min_rounds} to {self.max_rounds}")
        if self.noise_rounds and self.noise_rounds < MIN_ROUNDS:
            raise BadInput(f"the A/A run needs {MIN_ROUNDS} rounds or 0 for none, got {self.noise_rounds}")
        limits = (self.block_ms, self.time_limit_s, self.half_width_rel, self.warm_up_limit_s)
        if not all(0 < limit < math.inf for limit in limits) or not 0 <= self.warm_up_min_s <= self.warm_up_limit_s:
            raise BadInput(f"times and widths of a plan must be positive, warm-up minimum below its limit; got {self}")
        if self.warm_up_window < 4 or not 0 < self.confidence < 1:
            raise BadInput(f"warm-up window >= 4 and 0 < confidence < 1, got {self.warm_up_window}, {self.confidence}")

    @property
    def warm_up_rule(self) -> str:
        return (
            f"at least {self.warm_up_min_s:g} s and {self.warm_up_window} calls, until the last {self.warm_up_window} "
            f"calls drift by at most {100 * self.warm_up_tolerance_rel:g} % (Theil-Sen) or show no trend "
            f"(Mann-Kendall |z| < 1.64), at most {self.warm_up_limit_s:g} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Calls made before the measurement; `flat` is False when the time limit ended them."""

    samples_ms: tuple[float, ...]
    flat: bool

    def call_ms(self) -> float:
        """How long a warm call takes on average: the mean of the later half, since blocks are sized by it."""
        return fmean(self.samples_ms[len(self.samples_ms) // 2 :])


def warm_up(bound: Bound, plan: Plan, clock: Clock) -> WarmUp:
    """Call until the times stop falling; see Plan.warm_up_rule."""
    started, taken = clock(), list[float]()
    while True:
        laps = bound.laps(1, clock)
        taken.append(laps.compute_ms[0] if laps.compute_ms else laps.wall_ms)
        elapsed_s = (clock() - started) / 1e9
        enough = elapsed_s >= plan.warm_up_min_s and len(taken) >= plan.warm_up_window
        if enough and _is_flat(taken[-plan.warm_up_window :], plan.warm_up_tolerance_rel):
            return WarmUp(samples_ms=tuple(taken), flat=True)
        if elapsed_s >= plan.warm_up_limit_s:
            return WarmUp(samples_ms=tuple(taken), flat=False)


def calls_per_block(call_ms: float, block_ms: float) -> int:
    """So many calls that a block lasts about `block_ms`: 1 to 200."""
    return min(max(math.ceil(block_ms / call_ms), 1), 200)


def settle_calls(calls: int) -> int:
    """Untimed calls at the head of a block, slowed by the other subject's cache contents: 1 when calls are short.

    Calls so long that a block holds fewer than four are not changed by the few microseconds that refilling takes.
    """
    return 1 if calls >= 4 else 0


def measure_pair(
    bounds: Mapping[str, Bound],
    plan: Plan,
    *,
    calls: int,
    clock: Clock,
    watch: Watch = unwatched,
    on_round: Callable[[int], None] | None = None,
) -> tuple[tuple[Block, ...], str]:
    """Measure two subjects in ABBA rounds (ABBA, BAAB, ...) until the plan's question is answered; says why it stopped.

    Args:
        bounds: two warm subjects by name, the reference first.
        calls: timed calls in each block; a round has two blocks of each subject.
        watch: the state of the GPU, asked between blocks; a throttled block spoils its round.
        on_round: called with the rounds done.
    """
    reference, candidate = bounds
    started, blocks, stop = clock(), list[Block](), None
    with no_garbage_collection():
        for index in count():
            blocks += _round(bounds, index, calls, started, clock, watch)
            if on_round is not None:
                on_round(index + 1)
            stop = _stop(blocks, reference, candidate, plan, (clock() - started) / 1e9)
            if stop is not None:
                break
    assert stop is not None, "rounds are counted without end"
    return tuple(blocks), stop


def measure_rounds(
    bounds: Mapping[str, Bound],
    rounds: int,
    *,
    calls: int,
    clock: Clock,
    watch: Watch = unwatched,
    on_round: Callable[[int], None] | None = None,
) -> tuple[Block, ...]:
    """Measure any number of subjects for so many rounds, forth and back within each: 1 2 3 3 2 1, then 3 2 1 1 2 3."""
    started, blocks = clock(), list[Block]()
    with no_garbage_collection():
        for index in range(rounds):
            blocks += _round(bounds, index, calls, started, clock, watch)
            if on_round is not None:
                on_round(index + 1)
    return tuple(blocks)


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


def _round(
    bounds: Mapping[str, Bound], index: int, calls: int, started: int, clock: Clock, watch: Watch
) -> list[Block]:
    return [_block(bounds[name], name, index, calls, started, clock, watch) for name in _order(tuple(bounds), index)]


def _order(names: tuple[str, ...], index: int) -> tuple[str, ...]:
    """Forth and back, so that a steady drift cancels; every other round begins at the other end, in fairness."""
    back = names[::-1]
    return names + back if index % 2 == 0 else back + names


def _block(bound: Bound, name: str, index: int, calls: int, started: int, clock: Clock, watch: Watch) -> Block:
    settle = settle_calls(calls)
    if settle:
        bound.laps(settle, clock)
    at_s = (clock() - started) / 1e9
    laps = bound.laps(calls, clock)
    state = watch()
    throttle = [reason for reason in (state.throttle if state else ()) if reason in THROTTLED]
    return Block(
        round=index,
        subject=name,
        at_s=at_s,
        calls=laps.calls,
        wall_ms=laps.wall_ms,
        compute_ms=laps.compute_ms,
        end_to_end_ms=laps.end_to_end_ms,
        enqueue_ms=laps.enqueue_ms,
        lost_ms=laps.lost_ms,
        dropped=f"throttled: {', '.join(throttle)}" if throttle else None,
        gpu=state,
    )


def _stop(blocks: Sequence[Block], reference: str, candidate: str, plan: Plan, elapsed_s: float) -> str | None:
    """Why to stop now, or None. Width alone decides, never the verdict: stopping on a verdict would favour it."""
    done = len({block.round for block in blocks})
    if done >= plan.max_rounds:
        return "round limit"
    kept = len(quiet_spans(blocks))
    late = elapsed_s >= plan.time_limit_s
    if late and (kept >= MIN_ROUNDS or elapsed_s >= 2 * plan.time_limit_s):
        return "time limit"
    if kept < plan.min_rounds or kept % max(kept // LOOKS, 1):
        return None
    measure = comparison_measure(blocks)
    ratio = ratio_of_medians(
        samples(blocks, reference, measure),
        samples(blocks, candidate, measure),
        confidence=plan.confidence,
        draws=plan.draws,
        seed=plan.seed,
    )
    return "narrow" if ratio.half_width_rel <= plan.half_width_rel else None


def _is_flat(window_ms: Sequence[float], tolerance_rel: float) -> bool:
    return abs(trend(window_ms)) <= tolerance_rel or abs(trend_score(window_ms)) < 1.64
