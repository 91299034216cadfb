"""The state of GPU and CPUs around a block of calls: clocks, limits, temperature, and what slowed the block down."""

from dataclasses import dataclass, replace

# States in which a GPU slows down. A power cap is normal for a busy card and only causes a warning.
SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake", "sw_thermal_slowdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of the GPU after a block; `throttle` has NVML's reasons before and after it."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: tuple[str, ...]
    foreign_processes: int
    power_limit_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuState:
    """State of the CPUs after a block; `throttle` has the reasons why they slowed down or paused during the block.

    `clock_mhz` is the highest clock of the CPUs read, `quota_cpus` the number of CPUs that control groups grant, and
    `paused_ms` the time that control groups stopped threads of their processes, summed over CPUs.
    """

    governor: str | None
    clock_mhz: int | None
    temperature_c: int | None
    quota_cpus: float | None
    paused_ms: float
    throttle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The state of GPU and CPUs, None for what can't be read."""

    gpu: GpuState | None = None
    cpu: CpuState | None = None

    def since(self, before: "MachineState") -> "MachineState":
        """Return this state with the GPU's throttle reasons of the state before, too."""
        if self.gpu is None or before.gpu is None:
            return self
        reasons = tuple(dict.fromkeys((*before.gpu.throttle, *self.gpu.throttle)))
        return replace(self, gpu=replace(self.gpu, throttle=reasons))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of a round; `dropped` is the reason why it doesn't count.

    `launch` is the process that measured it, from 0 on; rounds are counted over all launches.
    """

    round: int
    subject: str
    dropped: str | None = None
    launch: int = 0
    gpu: GpuState | None = None
    cpu: CpuState | None = None

    @property
    def throttled(self) -> tuple[str, ...]:
        """The reasons why the hardware or a quota slowed this block down."""
        slowed = [reason for reason in (self.gpu.throttle if self.gpu else ()) if reason in SLOWED]
        return (*slowed, *(self.cpu.throttle if self.cpu else ()))
