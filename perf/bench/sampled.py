"""Outputs taken from inside a timed run, held against what the same runner answers when it is asked plainly.

A number is worth nothing when what was timed isn't what was verified: a graph that was captured with other weights, a
call that returned early. Runners timed by the host's clock hand their outputs out; those of a GPU stay on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from ground.feeds import Feeds, Outputs, batch_size, checked_answers
from ground.ports import OutputPort, Port
from perf.parity.structure import StructuralTest, timed_run
from perf.record.runs import Flat
from perf.runners.memory import Gauge
from perf.runners.protocol import HostBound, Runner
from perf.timing.laps import Bound

BOUND = 1e-4


@dataclass(slots=True)
class _LastCall:
    """What was bound and what the last timed call gave, None before the first."""

    feeds: Feeds
    bound: HostBound
    answer: object = None

    def outputs(self) -> Outputs:
        return self.bound.outputs(self.answer)


@dataclass(slots=True)
class SampledRunner:
    """A runner that keeps the last output of every batch it was timed on; `heard` gets the findings when it closes."""

    name: str
    runner: Runner
    heard: Callable[[StructuralTest], None]
    _last_calls: list[_LastCall] = field(default_factory=list, init=False, repr=False)

    def __enter__(self) -> Self:
        self.runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for last_call in self._last_calls:
                    self._compare(last_call)
        finally:
            self.runner.__exit__(kind, error, trace)

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self.runner.inputs

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        return self.runner.outputs

    def __call__(self, feeds: Feeds) -> Outputs:
        return self.runner(feeds)

    def bind(self, feeds: Feeds) -> Bound:
        bound = self.runner.bind(feeds)
        if not isinstance(bound, HostBound):
            return bound
        last_call, call = _LastCall(feeds, bound), bound.call
        self._last_calls.append(last_call)

        def keeping() -> None:
            last_call.answer = call()

        return replace(bound, call=keeping)

    def gauge(self) -> Gauge | None:
        return self.runner.gauge()

    def describe(self) -> Flat:
        return self.runner.describe()

    def _compare(self, last_call: _LastCall) -> None:
        """Raises BadInput where a call didn't answer each input: what was timed is no model."""
        if last_call.answer is not None:
            batch = batch_size(last_call.feeds)
            where = f"{self.name} ({self.runner.describe().get('model', 'in memory')})"
            timed = checked_answers(last_call.outputs(), batch, where=where)
            self.heard(timed_run(f"{self.name} at batch {batch}", timed, self.runner(last_call.feeds), bound=BOUND))
