"""Counters of energy: RAPL of CPUs, in sysfs, and the total-energy counter of a GPU, through NVML."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .gpu import Gpu, open_gpu

POWERCAP = Path("/sys/class/powercap")
RAPL_PERIOD_S, NVML_PERIOD_S = 1e-3, 0.1
MICROJOULES, MILLIJOULES = 1e6, 1e3  # in a joule


class EnergySensor(Protocol):
    """A counter of joules that is updated every `period_s` seconds."""

    @property
    def name(self) -> str: ...

    @property
    def period_s(self) -> float: ...

    def joules(self) -> float:
        """Return the joules since a fixed time. Raises OSError if the counter can't be read any more."""
        ...


@dataclass(frozen=True, slots=True)
class NoSensor:
    """The reason why the energy can't be measured, and the remedy."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


UNMEASURED = NoSensor("energy was not asked for", "give --energy-time")


@dataclass(slots=True)
class Rapl:
    """The sum of the package domains of RAPL, which contain those of cores and caches; counters that wrap go on."""

    name: str
    ranges_uj: dict[Path, int]
    """The files of the counters, and the reading at which each starts again from 0."""
    period_s: float = RAPL_PERIOD_S
    _last_uj: dict[Path, int] = field(default_factory=dict, init=False)
    _total_uj: int = field(default=0, init=False)

    def joules(self) -> float:
        for path, range_uj in self.ranges_uj.items():
            now_uj = read_number(path)
            rise_uj = now_uj - self._last_uj.get(path, now_uj)
            self._total_uj += rise_uj if rise_uj >= 0 else rise_uj + range_uj
            self._last_uj[path] = now_uj
        return self._total_uj / MICROJOULES


@dataclass(frozen=True, slots=True)
class Nvml:
    """The total-energy counter of one GPU with its memory and board."""

    gpu: Gpu
    name: str
    period_s: float = NVML_PERIOD_S

    def joules(self) -> float:
        energy_mj = self.gpu.energy_mj()
        if energy_mj is None:
            raise OSError(f"{self.name}: NVML no longer answers")
        return energy_mj / MILLIJOULES


def find_rapl(powercap: Path = POWERCAP) -> Rapl | NoSensor:
    """Return the sensor of this machine's CPUs, over all packages, or why it can't be read."""
    # The kernel names the domains of AMD's CPUs so, too. Others are parts of a package, memory, or the whole machine.
    domains = [each for each in sorted(powercap.glob("intel-rapl:*")) if _text(each / "name").startswith("package")]
    if not domains:
        remedy = "measure on a machine of your own; on Linux load the module intel_rapl_msr"
        return NoSensor("no RAPL here (a virtual machine, a container, or a CPU without it)", remedy)
    try:
        ranges_uj = {each / "energy_uj": read_number(each / "max_energy_range_uj") for each in domains}
        for path in ranges_uj:
            read_number(path)
    except PermissionError:
        remedy = f"as root: chmod a+r {powercap}/intel-rapl:*/energy_uj (all other programs can read it then, too)"
        return NoSensor("RAPL may be read by root only", remedy)
    except (OSError, ValueError) as error:
        return NoSensor(f"RAPL can't be read ({error})", "look into the kernel's log")
    return Rapl(f"RAPL of {', '.join(_text(each / 'name') for each in domains)}", ranges_uj)


def read_number(path: Path) -> int:
    return int(_text(path))


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


@contextmanager
def open_nvml_sensor(uuid: str | None = None) -> Iterator[Nvml | NoSensor]:
    """Yield the sensor of the GPU with this UUID, of NVML's first one if None; a slice of a GPU has none of its own."""
    with open_gpu(uuid, exact=uuid is not None) as gpu:
        if gpu is None:
            remedy = "pip install nvidia-ml-py, or use a whole GPU"
            yield NoSensor("NVML finds no such GPU (a MIG slice has no counter)", remedy)
        elif gpu.energy_mj() is None:
            yield NoSensor(f"{gpu.name} has no energy counter", "measure on a GPU of the Volta generation or newer")
        else:
            yield Nvml(gpu, f"NVML of {gpu.name}")


@contextmanager
def open_sensor(device: str, uuid: str | None = None) -> Iterator[EnergySensor | NoSensor]:
    """Yield the sensor of the device, "cpu" or "cuda", or why there is none."""
    if device == "cpu":
        yield find_rapl()
        return
    with open_nvml_sensor(uuid) as sensor:
        yield sensor
