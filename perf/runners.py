"""What every runner is, and the binding that times one on the host's clock.

Runners live in files by what they run: `module_runner` (a torch module), `onnx_runner` (an ONNX file in ONNX Runtime),
`engine_runner` (a TensorRT or TensorRT-RTX plan). A runner never falls back: asked for a device, provider or precision
that it doesn't get, it raises Missing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput
from .memory import Gauge
from .runs import Flat
from .timing import Bound, Clock, Laps

Images = NDArray[np.float32]
Logits = NDArray[np.float32]


class Runner(Protocol):
    """A model made ready on a device; a context manager that holds it there."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def __call__(self, images: Images) -> Logits:
        """[B, 3, H, W] float32 -> [B, classes] float32."""
        ...

    def bind(self, images: Images) -> Bound:
        """Put one batch in place for timing; every call of the result runs the model on it once."""
        ...

    def gauge(self) -> Gauge | None:
        """What tells its memory; valid before it is entered."""
        ...

    def describe(self) -> Flat:
        """What it really runs on, flat: backend, version, device, precision, mode, clock, ...; valid once entered."""
        ...


@dataclass(frozen=True, slots=True)
class HostBound:
    """Calls timed by the host's clock: the model runs on the CPU and returns when it is done."""

    call: Callable[[], object]

    def laps(self, calls: int, clock: Clock) -> Laps:
        """One reading of the clock between calls, so that the harness adds one reading to a call and no more."""
        call, ticks = self.call, [0] * (calls + 1)
        ticks[0] = clock()
        for index in range(1, calls + 1):
            call()
            ticks[index] = clock()
        times = tuple((after - before) / 1e6 for before, after in pairwise(ticks))
        return Laps(calls=calls, wall_ms=(ticks[-1] - ticks[0]) / 1e6, compute_ms=times)


@dataclass(frozen=True, slots=True)
class Streams:
    """Several bound runners called at once, one thread each; calls overlap, so only their wall time is told."""

    bounds: tuple[Bound, ...]
    pool: ThreadPoolExecutor = field(repr=False)

    def laps(self, calls: int, clock: Clock) -> Laps:
        started = clock()
        running = [self.pool.submit(bound.laps, calls, clock) for bound in self.bounds]
        for future in running:
            future.result()
        return Laps(calls=calls * len(self.bounds), wall_ms=(clock() - started) / 1e6, compute_ms=())


def as_images(images: Images) -> Images:
    """Check what every runner is fed: [B, 3, H, W] float32, contiguous, not empty."""
    if images.ndim != 4 or images.dtype != np.float32 or len(images) == 0:
        raise BadInput(f"images must be float32 [B, 3, H, W] with B >= 1, got {images.dtype} {list(images.shape)}")
    return np.ascontiguousarray(images)


def batch_of(images: Images, batch: int) -> Images:
    """The first `batch` images, begun again from the first when there are fewer."""
    if batch < 1:
        raise BadInput(f"a batch size is at least 1, got {batch}")
    return as_images(images[np.arange(batch) % len(images)])
