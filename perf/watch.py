"""What else the machine does while something is timed: waiting for a CPU, and the state of the GPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .runs import Flat, GpuState, Scalar

CpuTime = tuple[int, int]  # nanoseconds the threads of this process ran, and waited while another program had the CPU

# NVML's bits (nvmlClocksEventReasons*), named as nvidia-smi names them.
THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Two functions asked between blocks, never during one; None where the system tells nothing."""

    cpu: Callable[[], CpuTime] | None = None
    gpu: Callable[[], GpuState | None] | None = None


def cpu_time(tasks: Path = Path("/proc/self/task")) -> CpuTime:
    """Sums over this process's threads, from the scheduler's own account; a thread that just ended counts no more."""
    ran = waited = 0
    for task in tasks.iterdir():
        try:
            fields = (task / "schedstat").read_text(encoding="utf-8").split()
        except OSError:
            continue
        ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran, waited


def waiting_share(before: CpuTime, after: CpuTime) -> float | None:
    """Of the time that threads wanted to run, the share they waited; None when none ran."""
    ran, waited = after[0] - before[0], max(after[1] - before[1], 0)
    return waited / (ran + waited) if ran > 0 else None


@contextmanager
def watching() -> Iterator[tuple[Watch, Flat | None]]:
    """The watch of this machine, and the description of its GPU if NVML (package nvidia-ml-py) finds one."""
    cpu = cpu_time if Path("/proc/self/schedstat").exists() else None
    nvml = _nvml()
    if nvml is None:
        yield Watch(cpu=cpu), None
        return
    try:
        gpu = Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(0), os.getpid())
        yield Watch(cpu=cpu, gpu=gpu.state), gpu.describe()
    finally:
        nvml.nvmlShutdown()


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU through NVML. A reading that the card or driver refuses is None."""

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
        """The keys of perf.environment that concern the GPU; `clocks` is the limit set for applications, if any."""
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
