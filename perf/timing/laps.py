"""Times of consecutive calls, the rules of a measurement, and the warm-up. The clock is an argument."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from ground.errors import BadInput
from perf.stats.stats import MIN_ROUNDS, trend, trend_score

Clock = Callable[[], int]
AUDIT_ROUNDS = 8
WARM_UP_SHARE = 1 / 8  # of a batch size's time limit, for each subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Laps:
    """Wall time of consecutive calls, and a time for each unless calls overlap.

    `compute_ms` is measured between events or by the host's clock, `end_to_end_ms` includes copies, `enqueue_ms` is the
    time to issue the calls, and `lost_ms` the wait for a CPU, None if unknown.
    """

    calls: int
    wall_ms: float
    compute_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...] | None = None
    enqueue_ms: float | None = None
    lost_ms: tuple[float, ...] | None = None


class Bound(Protocol):
    """A runner with one batch at fixed shapes and addresses, ready for repeated calls."""

    def laps(self, calls: int, clock: Clock) -> Laps: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rules of a measurement, stored in its record.

    Rounds are added until the speed-up's interval is within `half_width_rel` on either side (a third of a gate's margin
    is a good choice) or the time is up. `time_limit_s` covers all work for a batch size but its energy. Blocks are
    short, so that both subjects of a round run under the same load. `audit_rounds` compare one repeated batch with
    varied ones.
    """

    block_ms: float = 25.0
    min_rounds: int = 16
    max_rounds: int = 500
    time_limit_s: float = 20.0
    half_width_rel: float = 0.01
    noise_rounds: int = 8
    audit_rounds: int = 0
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
        for what, rounds in (("A/A run", self.noise_rounds), ("audit", self.audit_rounds)):
            if rounds and rounds < MIN_ROUNDS:
                raise BadInput(f"the {what} needs {MIN_ROUNDS} rounds or 0 for none, got {rounds}")
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
            f"(Mann-Kendall |z| < 1.64), at most {self.warm_up_limit_s:g} s and "
            f"{100 * WARM_UP_SHARE:g} % of the time limit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Calls before the measurement; `flat` is False if the time limit ended them."""

    samples_ms: tuple[float, ...]
    flat: bool

    def call_ms(self) -> float:
        return fmean(self.samples_ms[len(self.samples_ms) // 2 :])


def warm_up(
    bound: Bound, plan: Plan, clock: Clock, *, begun: Sequence[float] = (), limit_s: float = math.inf
) -> WarmUp:
    """Call until the times are flat (Plan.warm_up_rule) or `limit_s` is over; `begun` has times of earlier calls."""
    started, samples_ms, limit_s = clock(), list(begun), min(limit_s, plan.warm_up_limit_s)
    while True:
        laps = bound.laps(1, clock)
        samples_ms.append(laps.compute_ms[0] if laps.compute_ms else laps.wall_ms)
        elapsed_s = (clock() - started) / 1e9
        enough = elapsed_s >= plan.warm_up_min_s and len(samples_ms) >= plan.warm_up_window
        window_ms = samples_ms[-plan.warm_up_window :]
        if enough and (abs(trend(window_ms)) <= plan.warm_up_tolerance_rel or abs(trend_score(window_ms)) < 1.64):
            return WarmUp(samples_ms=tuple(samples_ms), flat=True)
        if elapsed_s + samples_ms[-1] / 1e3 > limit_s:
            return WarmUp(samples_ms=tuple(samples_ms), flat=False)


class TimeLimit:
    """A limit of seconds that starts at construction."""

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self.clock, self.limit_s, self._started_ns = clock, limit_s, clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that the body takes."""
        began_ns = self.clock()
        yield
        self._started_ns += self.clock() - began_ns

    @property
    def spent_s(self) -> float:
        return (self.clock() - self._started_ns) / 1e9

    @property
    def left_s(self) -> float:
        return self.limit_s - self.spent_s
