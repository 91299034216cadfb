"""What else the machine does while something is timed: other programs on the CPU, the state of the GPU."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from perf.record.runs import Flat, GpuState, Scalar

# NVML's bits (nvmlClocksEventReasons*), named as nvidia-smi names them.
THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


Watch = Callable[[], GpuState | None]


def unwatched() -> None:
    """The watch of a machine without a GPU."""


def involuntary_switches() -> int:
    """How often a thread of this process lost its CPU to another program."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


LostTime = Callable[[], int]


@contextmanager
def lost_time(
    tasks: str = "/proc/self/task", switches: Callable[[], int] = involuntary_switches
) -> Iterator[LostTime | None]:
    """Nanoseconds that threads waited for a CPU which other programs had, since last asked; None on other systems.

    The kernel's count of involuntary switches is asked first, as that takes a microsecond; only when it has risen are
    the threads' own accounts read, so that an undisturbed call costs next to nothing to watch. The threads are those
    alive on entry: their accounts stay open, which makes reading one another microsecond.
    """
    accounts = _opened(tasks)
    if not accounts:
        yield None
        return
    last_switches, waited = switches(), _waited_ns(accounts)

    def lost_ns() -> int:
        nonlocal last_switches, waited
        now = switches()
        if now == last_switches:
            return 0
        last_switches, before = now, waited
        waited = _waited_ns(accounts)
        return max(waited - before, 0)

    try:
        yield lost_ns
    finally:
        for account in accounts:
            os.close(account)


def _opened(tasks: str) -> list[int]:
    """A file descriptor of each thread's scheduler account; a thread that ends meanwhile has none."""
    opened = []
    for task in os.listdir(tasks) if os.path.isdir(tasks) else ():
        with suppress(OSError):
            opened.append(os.open(f"{tasks}/{task}/schedstat", os.O_RDONLY))
    return opened


def _waited_ns(accounts: list[int]) -> int:
    """The second field: time spent ready to run. An ended thread can no longer be read."""
    waited = 0
    for account in accounts:
        with suppress(OSError):
            waited += int(os.pread(account, 128, 0).split()[1])
    return waited


@contextmanager
def watching(uuid: str | None = None) -> Iterator[tuple[Watch, Flat | None]]:
    """The watch of a GPU and its description, if NVML (package nvidia-ml-py) finds one.

    Of several it is the one of this UUID, as `perf.runners.cuda.first_uuid` tells the one that CUDA runs on; NVML
    counts all of a machine's GPUs, CUDA those that a process may see, in an order of its own. None takes the first.
    """
    nvml = _nvml()
    if nvml is None:
        yield unwatched, None
        return
    try:
        gpu = Gpu(nvml, _handle(nvml, uuid), os.getpid())
        yield gpu.state, gpu.describe()
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str | None) -> Any:
    """The GPU of this UUID; the first where none is asked for or NVML does not know it (a slice of one)."""
    if uuid is not None:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
    return nvml.nvmlDeviceGetHandleByIndex(0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU through NVML. A reading that the card or driver refuses is None."""

    nvml: Any
    handle: Any
    pid: int

    def state(self) -> GpuState:
        nvml = self.nvml
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return GpuState(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1e3,
            throttle=tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
            foreign_processes=sum(process.pid != self.pid for process in self._processes()),
        )

    def describe(self) -> dict[str, Scalar]:
        """What perf.timing.environment tells of the GPU; `clocks` is the limit set for applications, if any."""
        nvml = self.nvml
        limit_mw = self._ask(nvml.nvmlDeviceGetPowerManagementLimit)
        capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability)
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return {
            "gpu": _text(nvml.nvmlDeviceGetName(self.handle)),
            "gpu_count": nvml.nvmlDeviceGetCount(),
            "sm": None if capability is None else f"{capability[0]}.{capability[1]}",
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "power_limit_w": None if limit_mw is None else limit_mw / 1e3,
            "clocks": self._ask(nvml.nvmlDeviceGetApplicationsClock, nvml.NVML_CLOCK_SM),
        }

    def _processes(self) -> list[Any]:
        return list(self._ask(self.nvml.nvmlDeviceGetComputeRunningProcesses) or ())

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None


def _nvml() -> Any:
    """NVML once initialised, None without the package, the driver or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    if pynvml.nvmlDeviceGetCount() == 0:
        pynvml.nvmlShutdown()
        return None
    return pynvml


def _text(name: str | bytes) -> str:
    """Older bindings answer in bytes."""
    return name.decode() if isinstance(name, bytes) else name
