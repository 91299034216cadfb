"""Outputs taken from inside a timed run, held against what the same runner answers when it is asked plainly.

A number is worth nothing when what was timed isn't what was verified: a graph that was captured with other weights, a
call that returned early. Runners timed by the host's clock hand their outputs out; those of a GPU stay on it.
"""

from dataclasses import dataclass, field, replace

from ground.feeds import Feeds, batch_size, checked_answers
from perf.parity.structure import StructuralTest, timed_run
from perf.runners.protocol import HostBound, Runner
from perf.timing.laps import Bound

BOUND = 1e-4


@dataclass(slots=True)
class Sample:
    """One batch bound to a runner, and what the last timed call on it gave, None before the first."""

    runner: Runner
    feeds: Feeds
    bound: HostBound
    _answer: object = field(default=None, init=False, repr=False)

    def bound_to_keep(self) -> Bound:
        """The bound batch, whose calls leave their answer here."""
        call = self.bound.call

        def keeping() -> None:
            self._answer = call()

        return replace(self.bound, call=keeping)

    def test(self, name: str) -> StructuralTest | None:
        """The last answer against that of a plain call, which is made here; None where nothing was timed. Raises
        BadInput where a call didn't answer each input: what was timed is no model.
        """
        if self._answer is None:
            return None
        batch = batch_size(self.feeds)
        where = f"{name} ({self.runner.describe().get('model', 'in memory')})"
        timed = checked_answers(self.bound.outputs(self._answer), batch, where=where)
        return timed_run(f"{name} at batch {batch}", timed, self.runner(self.feeds), bound=BOUND)
