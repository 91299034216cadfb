"""One batch again and again against varied ones: what answers out of a cache is quicker on the one.

After MLPerf Inference's compliance test 04, which holds one sample, repeated, against many. Outputs of both are sampled
inside the timed runs, as those of every measurement (test 01; see perf.bench.opened_subject).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from ground.feeds import Feeds, batch_of
from perf.record.runs import Block
from perf.stats.repeats import ONE, VARIED
from perf.timing.laps import Bound, Clock, Laps, TimeLimit
from perf.timing.rounds import measure_rounds
from perf.timing.watch import Watch

BATCHES = 4
CALLS_AROUND = 2 * BATCHES + BATCHES + 1  # ahead of the rounds, and the plain ones that answers are held against


def varied_batches(feeds: Feeds, batch: int) -> list[Feeds]:
    """BATCHES different batches of these inputs [N, ...]: others of them first, moved on along their last axis, so that
    one input varies too. What all inputs of one batch share, they share still.
    """
    return [
        batch_of({name: _shifted(array, step) for name, array in feeds.items()}, batch)
        for step in range(1, BATCHES + 1)
    ]


def _shifted(array: np.ndarray, step: int) -> np.ndarray:
    rows = np.roll(array, -step, axis=0)
    return np.roll(rows, step, axis=-1) if rows.ndim > 1 else rows


@dataclass(slots=True)
class RoundRobin:
    """Bound batches of one runner, called one after the other."""

    bounds: tuple[Bound, ...]
    _next: int = field(default=0, init=False)

    def laps(self, calls: int, clock: Clock) -> Laps:
        return joined([self._following().laps(1, clock) for _ in range(calls)])

    def _following(self) -> Bound:
        bound = self.bounds[self._next]
        self._next = (self._next + 1) % len(self.bounds)
        return bound


def joined(laps: list[Laps]) -> Laps:
    """Calls of several as those of one, without the time between them."""
    both = [each.end_to_end_ms for each in laps if each.end_to_end_ms is not None]
    lost = [each.lost_ms for each in laps if each.lost_ms is not None]
    issued = [each.enqueue_ms for each in laps if each.enqueue_ms is not None]
    return Laps(
        calls=sum(each.calls for each in laps),
        wall_ms=sum(each.wall_ms for each in laps),
        compute_ms=tuple(chain.from_iterable(each.compute_ms for each in laps)),
        end_to_end_ms=tuple(chain.from_iterable(both)) if len(both) == len(laps) else None,
        enqueue_ms=sum(issued) if len(issued) == len(laps) else None,
        lost_ms=tuple(chain.from_iterable(lost)) if len(lost) == len(laps) else None,
    )


def round_robin_calls(calls: int) -> int:
    """About so many calls, in whole turns over the bound batches."""
    return max(round(calls / BATCHES), 1) * BATCHES


def repeat_blocks(
    bind: Callable[[Feeds], Bound], feeds: Feeds, batch: int, rounds: int, *, calls: int, limit: TimeLimit, watch: Watch
) -> tuple[Block, ...]:
    """Both ways measured in rounds, in turns over equally many bound batches. A round has whole turns of them."""
    varied = [bind(each) for each in varied_batches(feeds, batch)]
    pair = {VARIED: RoundRobin(tuple(varied)), ONE: RoundRobin((bind(batch_of(feeds, batch)),) * BATCHES)}
    for bound in pair.values():
        bound.laps(BATCHES, limit.clock)
    turns = round_robin_calls(calls)
    return measure_rounds(pair, rounds, calls=turns, clock=limit.clock, watch=watch, limit_s=limit.left_s)
