"""Outputs taken from inside a timed run, held against what the same runner answers when it is asked plainly.

A number is worth nothing when what was timed isn't what was verified: a graph that was captured with other weights, a
call that returned early. Runners timed by the host's clock hand their outputs out; those of a GPU stay on it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import numpy as np

from perf.parity.structure import StructuralTest, timed_run
from perf.record.runs import Flat
from perf.runners.memory import Gauge
from perf.runners.protocol import HostBound, Images, Logits, Runner
from perf.timing.laps import Bound

BOUND = 1e-4


@dataclass(slots=True)
class _Kept:
    """The images that were bound and the output of the last timed call."""

    images: Images
    output: object = None

    def logits(self) -> Logits:
        first = self.output[0] if isinstance(self.output, list | tuple) else self.output
        return np.asarray(first, dtype=np.float32)


@dataclass(slots=True)
class SampledRunner:
    """A runner that keeps the last output of every batch it was timed on; `heard` gets the findings when it closes."""

    name: str
    runner: Runner
    heard: Callable[[StructuralTest], None]
    _kept: list[_Kept] = field(default_factory=list, init=False, repr=False)

    def __enter__(self) -> Self:
        self.runner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for kept in self._kept:
                    self._compare(kept)
        finally:
            self.runner.__exit__(kind, error, trace)

    def __call__(self, images: Images) -> Logits:
        return self.runner(images)

    def bind(self, images: Images) -> Bound:
        bound = self.runner.bind(images)
        if not isinstance(bound, HostBound):
            return bound
        kept, call = _Kept(images), bound.call
        self._kept.append(kept)

        def keeping() -> None:
            kept.output = call()

        return replace(bound, call=keeping)

    def gauge(self) -> Gauge | None:
        return self.runner.gauge()

    def describe(self) -> Flat:
        return self.runner.describe()

    def _compare(self, kept: _Kept) -> None:
        if kept.output is not None:
            name = f"{self.name} at batch {len(kept.images)}"
            self.heard(timed_run(name, kept.logits(), self.runner(kept.images), bound=BOUND))
