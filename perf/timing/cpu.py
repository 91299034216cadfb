"""The state of the CPUs that Linux shows in sysfs and in control groups."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ground.threads import CGROUPS, PROC, affinity_ids, cpu_groups, least_limit
from perf.record.states import CpuState

SYS = Path("/sys")
CLOCKS_READ = 16  # CPUs whose clocks are read, so that a reading stays short on large machines
THERMAL_ZONES = ("x86_pkg_temp", "cpu", "soc")
NANOSECONDS = 1_000_000  # in a millisecond


@dataclass(slots=True)
class Cpus:
    """The open files of the CPUs that this process may use; thermal counters and those of quotas count from 0."""

    governor: list[int]
    clocks: list[int]
    temperatures: list[int]
    thermal: list[int]
    quotas: list[int]
    groups: tuple[Path, ...]
    _counted: tuple[int, int, int] = field(default=(0, 0, 0), init=False)

    def state(self) -> CpuState | None:
        """Return the state now, with what slowed the CPUs down since the last call; None if there is nothing to say."""
        before = self._counted
        self._counted = thermal, pauses, paused_ns = (sum(_numbers(self.thermal)), *self._pauses())
        reasons = {"cpu_thermal": thermal > before[0], "cgroup_quota": pauses > before[1]}
        clock_khz, millidegrees = (max(_numbers(each), default=None) for each in (self.clocks, self.temperatures))
        governor = next((_text(each).strip() for each in self.governor), None)
        quota = least_limit(self.groups)
        if (governor, clock_khz, millidegrees, quota) == (None,) * 4 and not any(reasons.values()):
            return None
        return CpuState(
            governor=governor,
            clock_mhz=None if clock_khz is None else clock_khz // 1000,
            temperature_c=None if millidegrees is None else millidegrees // 1000,
            quota_cpus=quota,
            paused_ms=max(paused_ns - before[2], 0) / NANOSECONDS,
            throttle=tuple(name for name, holds in reasons.items() if holds),
        )

    def _pauses(self) -> tuple[int, int]:
        """Return how often the groups' quotas stopped threads, and for how many nanoseconds."""
        pauses = paused_ns = 0
        for quota in self.quotas:
            counts = dict(line.split(" ", 1) for line in _text(quota).splitlines() if " " in line)
            pauses += int(counts.get("nr_throttled", 0))
            paused_ns += int(counts.get("throttled_time", 0)) + 1000 * int(counts.get("throttled_usec", 0))
        return pauses, paused_ns


@contextmanager
def open_cpus(sys: Path = SYS, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Cpus]:
    """Yield the CPUs of this process; files that are absent or may not be read are left out."""
    cpus = [sys / "devices/system/cpu" / f"cpu{index}" for index in affinity_ids()]
    zones = sorted((sys / "class/thermal").glob("thermal_zone*"))
    of_cpus = [zone for zone in zones if _read(zone / "type").lower().startswith(THERMAL_ZONES)]
    groups = tuple(dict.fromkeys(cpu_groups(proc, cgroups)))
    with ExitStack() as stack:

        def opened(paths: Iterable[Path]) -> list[int]:
            files = []
            for path in paths:
                with suppress(OSError):
                    files.append(os.open(path, os.O_RDONLY))
                    stack.callback(os.close, files[-1])
            return files

        frequencies = [cpu / "cpufreq" for cpu in cpus]
        found = Cpus(
            governor=opened(each / "scaling_governor" for each in frequencies[:1]),
            clocks=opened(each / "scaling_cur_freq" for each in frequencies[:CLOCKS_READ]),
            temperatures=opened(zone / "temp" for zone in of_cpus),
            thermal=opened(path for cpu in cpus for path in sorted(cpu.glob("thermal_throttle/*_throttle_count"))),
            quotas=opened(group / "cpu.stat" for group in groups),
            groups=groups,
        )
        found.state()  # so that the counters count from now
        yield found


def _text(file: int) -> str:
    try:
        return os.pread(file, 4096, 0).decode()
    except OSError:  # a zone that is switched off, or a CPU that is
        return ""


def _numbers(files: Iterable[int]) -> list[int]:
    return [int(text) for file in files if (text := _text(file).strip()).lstrip("-").isdecimal()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
