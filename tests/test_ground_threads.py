"""The CPUs of a process by affinity and control groups, and the wait policy of its threads."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

import corp_deploy.__main__ as command
import corp_deploy.cli
from ground import threads
from ground.threads import cpu_quota, granted_cpus, set_thread_policy_, thread_limit, usable_cpus, wait_policy


def machine(tmp_path: Path, groups: str, limits: Mapping[str, str]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup and files of a control-group tree."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    for name, text in limits.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


GROUP = "cpu,cpuacct/docker/a/cpu.cfs_"
V1 = "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n2:cpuset:/\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/user/job\n", {"user/job/cpu.max": "max 100000\n", "user/cpu.max": "400000 100000\n"}, 4.0),
        ("0::/user/job\n", {"user/job/cpu.max": "50000 100000\n", "user/cpu.max": "400000 100000\n"}, 0.5),
        ("0::/not/mounted\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {}, None),
        ("", {}, None),
        (V1, {f"{GROUP}quota_us": "-1\n", f"{GROUP}period_us": "100000\n"}, None),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 3.0),
        (V1, {"memory/docker/a/cpu.max": "100000 100000\n"}, None),
        ("0::/\n", {"cpu.max": "100000 0\n"}, None),
        ("0::/\n", {"cpu.max": "\n"}, None),
    ],
)  # fmt: skip
def test_quota_is_the_tightest_limit_of_a_cgroup_and_its_parents(
    groups: str, limits: Mapping[str, str], expected: float | None, tmp_path: Path
) -> None:
    assert cpu_quota(*machine(tmp_path, groups, limits)) == expected


def test_missing_proc_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(("quota", "granted"), [(None, 8), (0.25, 1), (1.0, 1), (1.5, 2), (8.0, 8), (64.0, 8)])
def test_quota_is_rounded_up_to_whole_threads(quota: float | None, granted: int) -> None:
    assert granted_cpus(8, quota) == granted


def test_only_a_quota_below_the_affinity_sets_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "affinity_cpus", lambda: 4)
    for quota, limit in ((None, None), (4.0, None), (2.5, 3)):
        monkeypatch.setattr(threads, "cpu_quota", lambda quota=quota: quota)
        assert thread_limit() == limit
        assert usable_cpus() == (limit or 4)


def test_wait_policy_is_passive_unless_the_user_set_one() -> None:
    environment = dict[str, str]()
    set_thread_policy_(environment, None)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    assert wait_policy(environment) == "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=1000"
    for name, value in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "1000"), ("KMP_BLOCKTIME", "200")):
        environment = {name: value}
        set_thread_policy_(environment, None)
        assert environment == {name: value}
        assert wait_policy(environment) == f"{name}={value}"
    assert wait_policy({}) is None


def test_users_thread_limit_takes_precedence() -> None:
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    set_thread_policy_(environment, 2)
    assert environment["OMP_NUM_THREADS"] == "2"
    environment = {"OMP_NUM_THREADS": "7"}
    set_thread_policy_(environment, 2)
    assert environment["OMP_NUM_THREADS"] == "7"


def test_command_sets_the_wait_policy_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, str]()
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(command, "thread_limit", lambda: 3)
    monkeypatch.setattr(corp_deploy.cli, "main", lambda prog_name, obj: seen.update(os.environ))
    command.main()
    assert (seen["OMP_WAIT_POLICY"], seen["OMP_NUM_THREADS"]) == ("PASSIVE", "3")
