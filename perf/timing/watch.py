"""A flat description of the machine, and observation of its state and of CPU contention during a measurement."""

import hashlib
import json
import os
import platform
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from ground.threads import THREADS, affinity_cpus, cpu_quota, wait_policy
from perf.record.runs import ENVIRONMENT_MUST_MATCH, Flat, Scalar
from perf.record.states import MachineState

from .cpu import open_cpus
from .gpu import open_gpu

GPU_KEYS = ("gpu", "gpu_count", "sm", "driver", "cuda", "power_limit_w", "clocks")
PACKAGES = ("numpy", "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
CPUINFO = Path("/proc/cpuinfo")


def environment(gpu: Flat | None = None) -> dict[str, Scalar]:
    """Describe the machine without names of host, user or paths; `gpu` comes from `Gpu.describe`."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpu_count": affinity_cpus(),
        "cpu_quota": cpu_quota(),
        "omp_wait_policy": wait_policy(os.environ),
        "omp_num_threads": os.environ.get(THREADS),
        "cpu_governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package.replace("-", "_"): package_version(package) for package in PACKAGES},
        **{key: (gpu or {}).get(key) for key in GPU_KEYS},
    }


def fingerprint(described: Flat, keys: Iterable[str] = ENVIRONMENT_MUST_MATCH) -> str:
    """Return 16 hexadecimal digits of a digest of these keys' values, equal for machines with comparable latencies."""
    text = json.dumps({key: described.get(key) for key in keys}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name, or its architecture if the system doesn't know it."""
    names = _cpuinfo(CPUINFO, "model name")
    if names is None:
        return platform.processor() or platform.machine()
    return names[0].strip() if names else platform.machine()


def _cpuinfo(path: Path, key: str) -> list[str] | None:
    text = _read(path)
    lines = None if text is None else text.splitlines()
    return lines and [line.split(":", 1)[1] for line in lines if line.startswith(key)]


def has_vnni(cpuinfo: Path = CPUINFO) -> bool | None:
    """Return whether an x86 CPU adds INT8 products in 32 bits; None if unknown.

    ONNX Runtime's kernels saturate on other CPUs (see `reduce_range` in its documentation of quantisation).
    """
    flags = _cpuinfo(cpuinfo, "flags")
    return None if not flags else not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags[0].split())


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


Watch = Callable[[], MachineState]


def unwatched() -> MachineState:
    """Return a state without figures."""
    return MachineState()


LostTime = Callable[[], int]


@contextmanager
def lost_time(
    tasks: str = "/proc/self/task",
    switches: Callable[[], int] = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
) -> Iterator[LostTime | None]:
    """Yield a function that returns the nanoseconds that threads waited for a CPU since its last call; None if unknown.

    Only threads alive now count. The function reads the kernel's count of involuntary switches first, in a microsecond,
    and the accounts of the threads only if it rose.
    """
    accounts = []
    for task in os.listdir(tasks) if os.path.isdir(tasks) else ():
        with suppress(OSError):  # the thread may have ended
            accounts.append(os.open(f"{tasks}/{task}/schedstat", os.O_RDONLY))
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


def _waited_ns(accounts: list[int]) -> int:
    waited = 0
    for account in accounts:
        with suppress(OSError):
            waited += int(os.pread(account, 128, 0).split()[1])
    return waited


@contextmanager
def watching(uuid: str | None = None) -> Iterator[tuple[Watch, Flat | None]]:
    """Yield a function that reads the state of CPUs and GPU, and the GPU's description if NVML finds one.

    `uuid` is that of the GPU that CUDA uses (see `read_gpu_uuid`), None for NVML's first one.
    """
    with open_cpus() as cpus, open_gpu(uuid) as gpu:
        state = (lambda: None) if gpu is None else gpu.state
        yield lambda: MachineState(gpu=state(), cpu=cpus.state()), None if gpu is None else gpu.describe()
