"""One GPU through NVML (nvidia-ml-py): its state and its description."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from perf.record.runs import Scalar
from perf.record.states import GpuState

# NVML's bits (nvmlClocksEventReasons*), named as nvidia-smi names them.
THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU through NVML; a reading that the card or driver refuses is None."""

    nvml: Any
    handle: Any
    pids: tuple[int, ...]
    """This process, and its parent, which holds memory if it measures in several launches."""

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
            foreign_processes=sum(
                process.pid not in self.pids for process in self._ask(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
            ),
            power_limit_w=self._power_limit_w(),
        )

    @property
    def name(self) -> str:
        return str(self.nvml.nvmlDeviceGetName(self.handle))

    def energy_mj(self) -> int | None:
        """Return the energy since the driver was loaded, None on GPUs older than Volta."""
        energy_mj: int | None = self._ask(self.nvml.nvmlDeviceGetTotalEnergyConsumption)
        return energy_mj

    def describe(self) -> dict[str, Scalar]:
        """Return the GPU's part of `environment`; `clocks` is the limit set for applications, if any."""
        nvml = self.nvml
        capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability)
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return {
            "gpu": self.name,
            "gpu_count": nvml.nvmlDeviceGetCount(),
            "sm": None if capability is None else f"{capability[0]}.{capability[1]}",
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "power_limit_w": self._power_limit_w(),
            "clocks": self._ask(nvml.nvmlDeviceGetApplicationsClock, nvml.NVML_CLOCK_SM),
        }

    def _power_limit_w(self) -> float | None:
        limit_mw = self._ask(self.nvml.nvmlDeviceGetPowerManagementLimit)
        return None if limit_mw is None else limit_mw / 1e3

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None


def open_nvml() -> Any:
    """Return NVML's module, started, or None without nvidia-ml-py, its driver or a GPU."""
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


@contextmanager
def open_gpu(uuid: str | None = None, *, exact: bool = False) -> Iterator[Gpu | None]:
    """Yield the GPU with this UUID, or NVML's first one if NVML doesn't know it, unless `exact`; None without one."""
    nvml = open_nvml()
    if nvml is None:
        yield None
        return
    try:
        handle = None if exact else nvml.nvmlDeviceGetHandleByIndex(0)
        if uuid is not None:
            with suppress(nvml.NVMLError):  # NVML doesn't find a MIG slice by its UUID
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        yield None if handle is None else Gpu(nvml, handle, (os.getpid(), os.getppid()))
    finally:
        nvml.nvmlShutdown()
