"""The state of CPUs, read from a simulated tree of sysfs and control groups."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from perf.record.states import CpuState
from perf.timing import cpu
from perf.timing.cpu import Cpus, open_cpus
from perf.timing.watch import unwatched, watching
from tests.doubles import some

CPU = "sys/devices/system/cpu/cpu"
TREE = {
    **{f"{CPU}{index}/cpufreq/scaling_governor": "schedutil\n" for index in (0, 1)},
    f"{CPU}0/cpufreq/scaling_cur_freq": "800000\n",
    f"{CPU}1/cpufreq/scaling_cur_freq": "3100500\n",
    f"{CPU}0/thermal_throttle/core_throttle_count": "3\n",
    f"{CPU}1/thermal_throttle/package_throttle_count": "9\n",
    f"{CPU}0/thermal_throttle/core_throttle_max_time_ms": "77\n",
    "sys/class/thermal/thermal_zone0/type": "acpitz\n",
    "sys/class/thermal/thermal_zone0/temp": "99000\n",
    "sys/class/thermal/thermal_zone1/type": "x86_pkg_temp\n",
    "sys/class/thermal/thermal_zone1/temp": "61500\n",
}
V2 = {
    "proc/cgroup": "0::/job\n",
    "cgroup/job/cpu.max": "150000 100000\n",
    "cgroup/job/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 2000\n",
    "cgroup/cpu.stat": "usage_usec 5\n",
}
V1 = {
    "proc/cgroup": "1:cpu:/\n",
    "cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "cgroup/cpu/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 2000000\n",
}


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "affinity_ids", lambda: [0, 1])


@contextmanager
def opened(root: Path, *trees: Mapping[str, str]) -> Iterator[Cpus]:
    for tree in trees:
        write(root, tree)
    with open_cpus(root / "sys", root / "proc", root / "cgroup") as cpus:
        yield cpus


@pytest.mark.usefixtures("two_cpus")
def test_governor_clock_temperature_and_quota_are_read(tmp_path: Path) -> None:
    with opened(tmp_path, TREE, V2) as cpus:
        assert cpus.state() == CpuState(
            governor="schedutil", clock_mhz=3100, temperature_c=61, quota_cpus=1.5, paused_ms=0.0, throttle=()
        )


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize(
    ("group", "later"),
    [
        (V2, {"cgroup/job/cpu.stat": "nr_periods 19\nnr_throttled 6\nthrottled_usec 9000\n"}),
        (V1, {"cgroup/cpu/cpu.stat": "nr_periods 19\nnr_throttled 6\nthrottled_time 9000000\n"}),
    ],
    ids=["version 2", "version 1"],
)
def test_pauses_by_a_quota_count_once(group: Mapping[str, str], later: Mapping[str, str], tmp_path: Path) -> None:
    with opened(tmp_path, TREE, group) as cpus:
        write(tmp_path, later)
        state = some(cpus.state())
        assert (state.throttle, state.paused_ms, state.quota_cpus) == (("cgroup_quota",), 7.0, 1.5)
        again = some(cpus.state())
        assert (again.throttle, again.paused_ms) == ((), 0.0)


@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize(
    "counter", ["0/thermal_throttle/core_throttle_count", "1/thermal_throttle/package_throttle_count"]
)
def test_rise_of_a_thermal_counter_is_throttling(counter: str, tmp_path: Path) -> None:
    with opened(tmp_path, TREE) as cpus:
        write(tmp_path, {f"{CPU}{counter}": "10\n", f"{CPU}0/thermal_throttle/core_throttle_max_time_ms": "990\n"})
        assert some(cpus.state()).throttle == ("cpu_thermal",)
        assert some(cpus.state()).throttle == ()


def test_machine_without_these_files_has_no_state(tmp_path: Path) -> None:
    with opened(tmp_path) as cpus:
        assert cpus.state() is None


@pytest.mark.usefixtures("two_cpus")
def test_unreadable_or_strange_files_are_left_out(tmp_path: Path) -> None:
    strange = {f"{CPU}0/cpufreq/scaling_cur_freq": "<unknown>\n", "cgroup/job/cpu.stat": "no numbers\n\n"}
    with opened(tmp_path, TREE | V2 | strange) as cpus:
        assert some(cpus.state()).clock_mhz == 3100


def test_this_machine_can_be_watched() -> None:
    with watching() as (watch, _):
        assert watch().gpu is None
    assert unwatched().cpu is None
