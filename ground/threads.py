"""The CPUs that this process may use, and the way its OpenMP threads wait for each other.

OpenMP threads spin while they wait. If another program displaces one of them, the others spin as long as that program
runs, on CPUs that it could have used. Passive threads sleep instead. Waking them costs a few percent if nothing else
runs, which a spin of microseconds before the sleep avoids.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from math import ceil
from pathlib import Path

PROC, CGROUPS = Path("/proc/self"), Path("/sys/fs/cgroup")
WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables of OpenMP and of its GNU and LLVM runtimes that say how threads wait."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
"""GNU's runtime, which torch uses on Linux, spins a thousand times before it sleeps; others sleep at once."""
THREADS = "OMP_NUM_THREADS"
"""The variable that OpenMP, MKL and OpenBLAS read."""


def affinity_ids() -> list[int]:
    """Return the numbers of the CPUs that the scheduler may run this process on."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [*range(os.cpu_count() or 1)]


def affinity_cpus() -> int:
    return len(affinity_ids())


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return the number of CPUs that control groups grant this process, None without a limit.

    It is the lowest limit of the group and its parents, of version 2 (`cpu.max`) or 1 (`cpu.cfs_quota_us`).
    """
    return least_limit(cpu_groups(proc, cgroups))


def least_limit(groups: Iterable[Path]) -> float | None:
    return min((limit for group in groups for limit in _read_limit(group)), default=None)


def cpu_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the directories of this process's control group for CPUs and of its parents."""
    for line in _read_text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers  # version 2 names no controllers, and this is the root itself
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            if place.is_relative_to(root):
                yield place


def _read_limit(group: Path) -> Iterator[float]:
    words = _read_text(group / "cpu.max").split() or [
        _read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
        yield int(words[0]) / int(words[1])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def granted_cpus(affinity: int, quota: float | None) -> int:
    """Return the number of threads that can run at once; a quota of one and a half CPUs keeps two threads busy."""
    return affinity if quota is None else min(affinity, max(ceil(quota), 1))


def usable_cpus() -> int:
    """Return the number of CPUs that this process can keep busy, by affinity and quota."""
    return granted_cpus(affinity_cpus(), cpu_quota())


def thread_limit() -> int | None:
    """Return the number of threads that a quota allows, None if it allows all CPUs of the affinity."""
    affinity, quota = affinity_cpus(), cpu_quota()
    granted = granted_cpus(affinity, quota)
    return granted if granted < affinity else None


def set_thread_policy_(environment: MutableMapping[str, str], limit: int | None) -> None:
    """Set variables so that OpenMP threads sleep while they wait and at most `limit` start, unless the user set them.

    They take effect in libraries that are loaded afterwards.
    """
    if not any(name in environment for name in WAIT_POLICIES):
        environment.update(PASSIVE)
    if limit is not None:
        environment.setdefault(THREADS, str(limit))


def wait_policy(environment: Mapping[str, str]) -> str | None:
    """Return the OpenMP wait settings in an environment, such as `OMP_WAIT_POLICY=PASSIVE`; None if there are none."""
    settings = [f"{name}={environment[name]}" for name in WAIT_POLICIES if name in environment]
    return " ".join(settings) or None
