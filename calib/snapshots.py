"""Moments of the first inputs, at several numbers of them, from the pass that takes those of all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from ground.errors import BadInput

from .moments import Moments


def _always(_: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """`write` is given the moments of the first n inputs for every n of `counts`, ascending: those that a calibration
    on these alone gives, bit by bit on a CPU. They may share memory with the running sums, so it must keep a copy.

    `written` tells a run that goes on after an interruption whether an earlier one is still there. Raises BadInput for
    counts that don't ascend from 1.
    """

    counts: tuple[int, ...]
    write: Callable[[int, Moments], None]
    written: Callable[[int], bool] = _always

    def __post_init__(self) -> None:
        refuse_counts(self.counts)

    def changed(self, change: Callable[[int, Moments], Moments]) -> "Snapshots":
        """The same, with moments changed before they are written."""
        return replace(self, write=lambda count, moments: self.write(count, change(count, moments)))

    def between(self, start: int, end: int) -> tuple[int, ...]:
        """Those beyond `start` and before `end`, both exclusive."""
        return tuple(count for count in self.counts if start < count < end)

    def split_batches(self, batch_size: int, inputs: int) -> bool:
        """Whether one falls inside a batch, so that its sums are taken in a copy."""
        return any(count % batch_size and count < inputs for count in self.counts)

    def refuse_lost(self, position: int) -> None:
        """Raises BadInput for one up to `position` that an interrupted run wrote and that is gone."""
        lost = [count for count in self.counts if count <= position and not self.written(count)]
        if lost:
            raise BadInput(
                f"snapshot of the first {lost[0]}: its file is missing, and the interrupted run is past it; put it "
                "back, or remove the checkpoint to start again"
            )


def refuse_counts(counts: tuple[int, ...]) -> None:
    """Raises BadInput unless they ascend from 1 or more."""
    if not counts or counts[0] < 1 or any(one >= other for one, other in pairwise(counts)):
        raise BadInput(f"snapshots: got {', '.join(map(str, counts)) or 'none'}, expected ascending counts from 1")
