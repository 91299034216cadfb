"""What a step takes: seconds, and the peak of this process's memory and of the GPU's while it runs.

Never part of what is digested: two runs of one step take different times and give equal bytes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """`peak_bytes` resident in this process, what it held before included; `device_peak_bytes` of tensors on the GPU;
    None where nothing tells.
    """

    seconds: float
    peak_bytes: int | None
    device_peak_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @property
    def words(self) -> str:
        """For people."""
        host = "" if self.peak_bytes is None else f", peak memory {self.peak_bytes / 2**20:,.0f} MiB"
        device = "" if self.device_peak_bytes is None else f", on the GPU {self.device_peak_bytes / 2**20:,.0f} MiB"
        return f"{self.seconds:,.1f} s{host}{device}"


class Gauge(Protocol):
    """Memory whose highest value since a reset is known, in bytes."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int: ...


class Stopwatch:
    """Parts of a process by name, added up where they run in turns; a peak is the highest of a part's turns."""

    def __init__(
        self, *, host: Gauge | None, device: Gauge | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._host, self._device, self._clock = host, device, clock
        self._efforts: dict[str, Effort] = {}

    @property
    def efforts(self) -> dict[str, Effort]:
        """By name, in the order in which they were first taken."""
        return dict(self._efforts)

    def as_json(self) -> dict[str, Any]:
        """The fields of each by its name."""
        return {name: effort.as_json() for name, effort in self._efforts.items()}

    @property
    def lines(self) -> list[str]:
        """One for each, for people."""
        return [f"{name}: {effort.words}" for name, effort in self._efforts.items()]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """A turn of this part; turns don't contain each other. One that fails is not counted."""
        gauges = self._host, self._device
        for gauge in gauges:
            if gauge is not None:
                gauge.reset_peak()
        start = self._clock()
        yield
        seconds = self._clock() - start
        host, device = (None if gauge is None else gauge.peak() for gauge in gauges)
        before = self._efforts.get(name, Effort(seconds=0.0, peak_bytes=None, device_peak_bytes=None))
        self._efforts[name] = Effort(
            seconds=before.seconds + seconds,
            peak_bytes=_higher(before.peak_bytes, host),
            device_peak_bytes=_higher(before.device_peak_bytes, device),
        )


def turn(watch: Stopwatch | None, name: str) -> AbstractContextManager[None]:
    """A turn where somebody takes the time."""
    return nullcontext() if watch is None else watch.of(name)


def _higher(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
