"""The protocol of runners, calls timed by the host's clock, and the memory of one runner among several.

A runner never falls back: it raises Missing for an unavailable device, provider or precision.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from ground.effort import Stopwatch
from ground.feeds import Feeds, Outputs
from ground.gpu import require_cuda
from ground.ports import OutputPort, Port
from perf.record.runs import Flat
from perf.timing.laps import Bound, Clock, Laps
from perf.timing.watch import LostTime, lost_time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryGauge:
    """Functions that measure memory of the process or device in bytes, and the name of the method."""

    method: str
    reset_peak: Callable[[], None]
    now: Callable[[], int]
    peak: Callable[[], int]


def resident_gauge(proc: Path = Path("/proc/self")) -> MemoryGauge | None:
    """Return the gauge of this process's resident set, None if the system can't reset its peak."""

    def reset() -> None:
        (proc / "clear_refs").write_text("5")

    def status(key: str) -> int:
        lines = (proc / "status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    try:
        reset()
    except OSError:
        return None
    return MemoryGauge("resident set", reset, lambda: status("VmRSS:"), lambda: status("VmHWM:"))


def torch_gauge() -> MemoryGauge:
    """Return the gauge of memory allocated by torch's CUDA allocator."""
    import torch

    def reset() -> None:
        require_cuda()
        torch.cuda.reset_peak_memory_stats()

    return MemoryGauge("torch allocator", reset, torch.cuda.memory_allocated, torch.cuda.max_memory_allocated)


def device_gauge() -> MemoryGauge:
    """Return the gauge of all memory in use on the device.

    Its peak is the larger of the values now and at the last reset, because the device has no counter for it.
    """
    import torch

    at_reset = 0

    def now() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def reset() -> None:
        nonlocal at_reset
        require_cuda()
        at_reset = now()

    return MemoryGauge("device memory in use", reset, now, lambda: max(at_reset, now()))


@dataclass(slots=True)
class Ledger:
    """A runner's memory over phases: the growth that earlier phases left, plus the highest growth of the last one."""

    gauge: MemoryGauge | None
    held_bytes: int = 0

    @property
    def method(self) -> str | None:
        return None if self.gauge is None else self.gauge.method

    def phase(self, work: Callable[[], T]) -> tuple[T, int | None]:
        """Return the result of `work` and the runner's peak memory during it in bytes, None if unknown."""
        if self.gauge is None:
            return work(), None
        self.gauge.reset_peak()
        before = self.gauge.now()
        result = work()
        peak = self.held_bytes + max(self.gauge.peak() - before, 0)
        self.held_bytes += max(self.gauge.now() - before, 0)
        return result, peak


def build_stopwatch(device: str) -> Stopwatch:
    return Stopwatch(host=resident_gauge(), device=torch_gauge() if device == "cuda" else None)


class Runner(Protocol):
    """A context manager that prepares a model on a device. Raises BadInput for feeds that don't fit."""

    @property
    def inputs(self) -> tuple[Port, ...]: ...

    @property
    def outputs(self) -> tuple[OutputPort, ...]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, feeds: Feeds) -> Outputs:
        """Return arrays [B, ...] in float32 by output for arrays [B, ...] by input."""
        ...

    def bind(self, feeds: Feeds) -> Bound:
        """Return one batch, placed on the device, on which each timed call runs the model once."""
        ...

    def gauge(self) -> MemoryGauge | None:
        """Return the gauge of the runner's memory, also before it is entered."""
        ...

    def describe(self) -> Flat:
        """Return the actual backend, version, device, precision, mode, clock and so on, once entered."""
        ...


@dataclass(frozen=True, slots=True)
class HostBound:
    """Calls timed by the host's clock; `watch` measures the wait for a CPU, `outputs` converts a call's result."""

    call: Callable[[], object]
    watch: Callable[[], AbstractContextManager[LostTime | None]] = lost_time
    outputs: Callable[[Any], Outputs] = lambda answer: answer

    def laps(self, calls: int, clock: Clock) -> Laps:
        """Return the times of `calls` calls, each between two readings of the clock with nothing else in between."""
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
    """Several bound runners called at once in a thread each; calls overlap, so only wall time is measured."""

    bounds: tuple[Bound, ...]
    pool: ThreadPoolExecutor = field(repr=False)

    def laps(self, calls: int, clock: Clock) -> Laps:
        started = clock()
        running = [self.pool.submit(bound.laps, calls, clock) for bound in self.bounds]
        for future in running:
            future.result()
        return Laps(calls=calls * len(self.bounds), wall_ms=(clock() - started) / 1e6, compute_ms=())
