"""Time and peak memory of the steps of a command, on the host and on the GPU.

They are never part of a digest, because two runs of a step take different times and give equal bytes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec

from .records import Natural

NAME = "effort.json"


def is_effort(path: Path) -> bool:
    """Return whether a path is that of an effort record: NAME in a directory, or X.NAME beside a file X."""
    return path.name == NAME or path.name.endswith(f".{NAME}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Time and peak memory of one step; None for memory that was not measured."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    peak_bytes: Natural | None
    """Resident memory of this process, including what it held before the step."""
    device_peak_bytes: Natural | None
    """Memory of tensors on the GPU."""

    def and_then(self, other: "Effort") -> "Effort":
        """Return the effort of both steps, one after the other: the sum of their times and the higher peaks."""
        return Effort(
            seconds=self.seconds + other.seconds,
            peak_bytes=_higher_known(self.peak_bytes, other.peak_bytes),
            device_peak_bytes=_higher_known(self.device_peak_bytes, other.device_peak_bytes),
        )

    @property
    def describe(self) -> str:
        host = "" if self.peak_bytes is None else f", peak memory {self.peak_bytes / 2**20:,.0f} MiB"
        device = "" if self.device_peak_bytes is None else f", on the GPU {self.device_peak_bytes / 2**20:,.0f} MiB"
        return f"{self.seconds:,.1f} s{host}{device}"


class Gauge(Protocol):
    """A counter of memory in bytes that knows its highest value since the last reset."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int: ...


class Stopwatch:
    """Efforts of the named parts of a process.

    Times of a part that runs several times are added, of its peaks the highest counts. While a part runs inside another
    one, the clock of the outer part stands still, so that every second counts for one part alone.
    """

    def __init__(
        self, *, host: Gauge | None, device: Gauge | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._host, self._device, self._clock = host, device, clock
        self._efforts: dict[str, Effort] = {}
        self._running: list[Effort] = []  # of the running parts, outermost first, without the parts inside each
        self._now = 0.0

    @property
    def efforts(self) -> dict[str, Effort]:
        """The efforts by part, in the order in which the parts first ended."""
        return dict(self._efforts)

    def as_json(self) -> dict[str, Any]:
        return {name: asdict(effort) for name, effort in self._efforts.items()}

    @property
    def lines(self) -> list[str]:
        return [f"{name}: {effort.describe}" for name, effort in self._efforts.items()]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the body as a part; the time of a body that fails counts for the part around it."""
        self._change()
        self._running.append(_NOTHING)
        try:
            yield
            self._change()
            self._efforts[name] = self._efforts.get(name, _NOTHING).and_then(self._running[-1])
        finally:
            self._running.pop()

    def _change(self) -> None:
        """Add the effort since the last call to the innermost running part, if any, and reset the peaks."""
        before, self._now = self._now, self._clock()
        if self._running:
            host, device = (None if gauge is None else gauge.peak() for gauge in (self._host, self._device))
            since = Effort(seconds=self._now - before, peak_bytes=host, device_peak_bytes=device)
            self._running[-1] = self._running[-1].and_then(since)
        for gauge in (self._host, self._device):
            if gauge is not None:
                gauge.reset_peak()


_NOTHING = Effort(seconds=0.0, peak_bytes=None, device_peak_bytes=None)


def measure_effort(watch: Stopwatch | None, name: str) -> AbstractContextManager[None]:
    """Measure the body as a part of `watch`, or not at all without one."""
    return nullcontext() if watch is None else watch.measure(name)


def _higher_known(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
