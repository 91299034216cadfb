"""Peak memory of one runner among several in a process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from ground.effort import Stopwatch
from ground.gpu import require_cuda

T = TypeVar("T")


class Gauge(Protocol):
    """Memory of the process or device in bytes."""

    @property
    def method(self) -> str: ...

    def reset_peak(self) -> None: ...

    def now(self) -> int: ...

    def peak(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ResidentSet:
    """The process's resident set on Linux; its peak can be reset."""

    proc: Path = Path("/proc/self")
    method: str = "resident set"

    def reset_peak(self) -> None:
        (self.proc / "clear_refs").write_text("5")

    def now(self) -> int:
        return self._status("VmRSS:")

    def peak(self) -> int:
        return self._status("VmHWM:")

    def _status(self, key: str) -> int:
        lines = (self.proc / "status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


@dataclass(frozen=True, slots=True)
class TorchAllocator:
    """What torch's CUDA allocator has handed out."""

    method: str = "torch allocator"

    def reset_peak(self) -> None:
        import torch

        require_cuda()
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        import torch

        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()


@dataclass(slots=True)
class DeviceMemory:
    """All that is in use on the device; its peak is the larger of now and the last reset, as no counter tells more."""

    method: str = "device memory in use"
    _at_reset: int = field(default=0, init=False)

    def reset_peak(self) -> None:
        require_cuda()
        self._at_reset = self.now()

    def now(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak(self) -> int:
        return max(self._at_reset, self.now())


@dataclass(slots=True)
class Ledger:
    """What one runner holds, phase by phase: growth it left behind, plus the highest growth of the last phase.

    Memory that a runner frees and another takes over is booked on neither twice nor exactly; it is an attribution.
    """

    gauge: Gauge
    held_bytes: int = 0

    def phase(self, work: Callable[[], T]) -> tuple[T, int]:
        """Do the work; returns its result and the runner's peak during it in bytes."""
        self.gauge.reset_peak()
        before = self.gauge.now()
        result = work()
        peak = self.held_bytes + max(self.gauge.peak() - before, 0)
        self.held_bytes += max(self.gauge.now() - before, 0)
        return result, peak


def stopwatch(device: str) -> Stopwatch:
    """One that tells the peak of this process, and of torch's allocator where torch works on a GPU."""
    return Stopwatch(host=resident_gauge(), device=TorchAllocator() if device == "cuda" else None)


def resident_gauge() -> Gauge | None:
    """The gauge of a runner on the CPU, None where the system doesn't let the peak be reset."""
    gauge = ResidentSet()
    try:
        gauge.reset_peak()
    except OSError:
        return None
    return gauge
