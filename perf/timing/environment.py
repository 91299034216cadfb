"""What this machine is, as far as a latency depends on it: one flat mapping of plain values."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from perf.record.runs import ENVIRONMENT_MUST_MATCH, Flat, Scalar

PACKAGES = ("numpy", "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
CPUINFO = Path("/proc/cpuinfo")


def environment(gpu: Flat | None = None) -> dict[str, Scalar]:
    """The machine's description; `gpu` is what `watch.Gpu.describe` says, None where there is no GPU to ask.

    Names no host, user or path. Versions are of the packages installed, null for those that aren't.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpu_count": cpu_count(),
        "cpu_governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package.replace("-", "_"): version(package) for package in PACKAGES},
        **{
            key: (gpu or {}).get(key) for key in ("gpu", "gpu_count", "sm", "driver", "cuda", "power_limit_w", "clocks")
        },
    }


def fingerprint(described: Flat, keys: Iterable[str] = ENVIRONMENT_MUST_MATCH) -> str:
    """A short digest of the keys that must match; equal on machines whose latencies may be compared."""
    text = json.dumps({key: described.get(key) for key in keys}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def version(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name as the system tells it, else its architecture."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def has_vnni(cpuinfo: Path = CPUINFO) -> bool | None:
    """Whether an x86 processor adds up products of INT8 in 32 bits; None where the system doesn't tell or it is another
    architecture's.

    Without it ONNX Runtime's kernels add two of them in sixteen bits, which saturate (its documentation of
    quantisation, on `reduce_range`).
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return None
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), None)
    return None if flags is None else not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def cpu_count() -> int | None:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
