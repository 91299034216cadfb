"""What every runner is, and the binding that times one on the host's clock.

Runners live in files by what they run: `module` (a torch module), `onnx` (an ONNX file in ONNX Runtime), `engine` (a
TensorRT or TensorRT-RTX plan). A runner never falls back: asked for a device, provider or precision
that it doesn't get, it raises Missing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from ground.feeds import Feeds, Outputs
from ground.ports import OutputPort, Port
from perf.record.runs import Flat
from perf.timing.laps import Bound, Clock, Laps
from perf.timing.watch import LostTime, lost_time

from .memory import Gauge


class Runner(Protocol):
    """A model made ready on a device; a context manager that holds it there.

    Feeds go in by the names of its inputs; what doesn't fit them is refused with BadInput, naming every mismatch.
    """

    @property
    def inputs(self) -> tuple[Port, ...]:
        """What it takes; valid once entered."""
        ...

    @property
    def outputs(self) -> tuple[OutputPort, ...]:
        """What it answers, in this order; valid once entered."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, feeds: Feeds) -> Outputs:
        """Arrays [B, ...] by input -> arrays [B, ...] float32 by output."""
        ...

    def bind(self, feeds: Feeds) -> Bound:
        """Put one batch in place for timing; every call of the result runs the model on it once."""
        ...

    def gauge(self) -> Gauge | None:
        """What tells its memory; valid before it is entered."""
        ...

    def describe(self) -> Flat:
        """What it really runs on, flat: backend, version, device, precision, mode, clock, ...; valid once entered."""
        ...


def _unchanged(answer: Any) -> Outputs:
    outputs: Outputs = answer
    return outputs


@dataclass(frozen=True, slots=True)
class HostBound:
    """Calls timed by the host's clock: the model runs on the CPU and returns when it is done.

    `watch` gives the time that threads lost to other programs, see perf.timing.watch.lost_time. `outputs` reads what a
    call gave, outside of any time.
    """

    call: Callable[[], object]
    watch: Callable[[], AbstractContextManager[LostTime | None]] = lost_time
    outputs: Callable[[Any], Outputs] = _unchanged

    def laps(self, calls: int, clock: Clock) -> Laps:
        """Two readings of the clock around each call and nothing else between them."""
        call, begun, ended, lost = self.call, [0] * calls, [0] * calls, [0] * calls
        with self.watch() as lost_ns:
            for index in range(calls):
                begun[index] = clock()
                call()
                ended[index] = clock()
                if lost_ns is not None:
                    lost[index] = lost_ns()
        return Laps(
            calls=calls,
            wall_ms=(ended[-1] - begun[0]) / 1e6,
            compute_ms=tuple((end - begin) / 1e6 for begin, end in zip(begun, ended, strict=True)),
            lost_ms=None if lost_ns is None else tuple(ns / 1e6 for ns in lost),
        )


@dataclass(frozen=True, slots=True)
class ParallelStreams:
    """Several bound runners called at once, one thread each; calls overlap, so only their wall time is told."""

    bounds: tuple[Bound, ...]
    pool: ThreadPoolExecutor = field(repr=False)

    def laps(self, calls: int, clock: Clock) -> Laps:
        started = clock()
        running = [self.pool.submit(bound.laps, calls, clock) for bound in self.bounds]
        for future in running:
            future.result()
        return Laps(calls=calls * len(self.bounds), wall_ms=(clock() - started) / 1e6, compute_ms=())
