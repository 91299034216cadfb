"""What a command takes, told beside its result and never written into what is digested."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ground.effort import Stopwatch


def stopwatch_on(device: str = "cpu") -> "Stopwatch":
    """One that tells the peak of this process, and of torch's allocator where the work runs on a GPU."""
    from ground.effort import Stopwatch
    from perf.runners.memory import TorchAllocator, resident_gauge

    return Stopwatch(host=resident_gauge(), device=TorchAllocator() if device == "cuda" else None)
