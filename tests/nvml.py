"""A stand-in for NVML, for machines without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace


class NvmlError(Exception):
    pass


@dataclass
class FakeNvml:
    """NVML of one card that refuses to tell its power."""

    name: str = "A Card"
    clock: int | None = None
    throttle: int = 0x04 | 0x40
    shut: bool = False
    uuids: tuple[str, ...] = ()
    energy_mj: Callable[[], int] | None = None
    NVMLError: type[Exception] = NvmlError
    NVML_CLOCK_SM: int = 1
    NVML_CLOCK_MEM: int = 2
    NVML_TEMPERATURE_GPU: int = 0

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        raise NvmlError("not supported")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        if self.energy_mj is None:
            raise NvmlError("not supported")
        return self.energy_mj()

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:
        return self.throttle

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        return {1: 1410, 2: 1593}[kind]

    def nvmlDeviceGetTemperature(self, handle: object, kind: int) -> int:
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]

    def nvmlDeviceGetPowerManagementLimit(self, handle: object) -> int:
        return 300_000

    def nvmlDeviceGetCudaComputeCapability(self, handle: object) -> tuple[int, int]:
        return (8, 6)

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlDeviceGetName(self, handle: object) -> str:
        return self.name

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.1"

    def nvmlDeviceGetApplicationsClock(self, handle: object, kind: int) -> int:
        if self.clock is None:
            raise NvmlError("not supported")
        return self.clock

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid not in self.uuids:
            raise NvmlError("not found")
        return uuid

    def nvmlShutdown(self) -> None:
        self.shut = True
