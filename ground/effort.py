"""What a step takes: seconds, and the peak of this process's memory and of the GPU's while it runs.

Never part of what is digested: two runs of one step take different times and give equal bytes.
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
    """Whether a record of what something took stands there: NAME in a directory, X.NAME beside a file X."""
    return path.name == NAME or path.name.endswith(f".{NAME}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`peak_bytes` resident in this process, what it held before included; `device_peak_bytes` of tensors on the GPU;
    None where nothing tells.
    """

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    peak_bytes: Natural | None
    device_peak_bytes: Natural | None

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    def and_then(self, other: "Effort") -> "Effort":
        """Of one after the other."""
        return Effort(
            seconds=self.seconds + other.seconds,
            peak_bytes=_higher(self.peak_bytes, other.peak_bytes),
            device_peak_bytes=_higher(self.device_peak_bytes, other.device_peak_bytes),
        )

    @property
    def describe(self) -> str:
        """For people."""
        host = "" if self.peak_bytes is None else f", peak memory {self.peak_bytes / 2**20:,.0f} MiB"
        device = "" if self.device_peak_bytes is None else f", on the GPU {self.device_peak_bytes / 2**20:,.0f} MiB"
        return f"{self.seconds:,.1f} s{host}{device}"


class Gauge(Protocol):
    """Memory whose highest value since a reset is known, in bytes."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int: ...


class Stopwatch:
    """Parts of a process by name, added up where they run in turns; a peak is the highest of a part's turns.

    A turn inside another one stops its clock: every second is one part's alone.
    """

    def __init__(
        self, *, host: Gauge | None, device: Gauge | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._host, self._device, self._clock = host, device, clock
        self._efforts: dict[str, Effort] = {}
        self._running: list[Effort] = []  # those that run: what each took so far, without the turns inside it
        self._now = 0.0

    @property
    def efforts(self) -> dict[str, Effort]:
        """By name, in the order in which they first ended."""
        return dict(self._efforts)

    def as_json(self) -> dict[str, Any]:
        """The fields of each by its name."""
        return {name: effort.as_json() for name, effort in self._efforts.items()}

    @property
    def lines(self) -> list[str]:
        """One for each, for people."""
        return [f"{name}: {effort.describe}" for name, effort in self._efforts.items()]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """A turn of this part. One that fails is not counted: its time is that of the turn around it."""
        self._change()
        self._running.append(_NOTHING)
        try:
            yield
            self._change()
            self._efforts[name] = self._efforts.get(name, _NOTHING).and_then(self._running[-1])
        finally:
            self._running.pop()

    def _change(self) -> None:
        """Another turn begins or the innermost one ends: that one is given what it took since the last change."""
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
    """A turn where somebody takes the time."""
    return nullcontext() if watch is None else watch.measure(name)


def _higher(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
