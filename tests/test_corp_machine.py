"""`doctor`'s findings on this machine, and the lower bounds that it shares with pyproject.toml."""

import itertools
import json
import platform
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.release import floors
from corp_deploy import machine
from ground import vulnerabilities
from ground.vulnerabilities import version_numbers
from tests.command import invoked

ROOT = Path(__file__).parents[1]


def findings() -> dict[str, dict[str, str]]:
    done = invoked("doctor", "--json")
    return {row["what"]: row for row in json.loads(done.stdout)["findings"]}


def pretend_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let doctor see these versions of packages in place of the installed ones."""
    installed = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: versions.get(name) or installed(name))


def test_doctor_and_pyproject_have_equal_lower_bounds() -> None:
    """The extras dev and docs have no bounds in doctor, because users don't install them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    lines = itertools.chain(project["dependencies"], *extras.values())
    assert floors.floors(map(Requirement, lines)) == dict(machine.FLOORS)


def test_installed_packages_satisfy_the_lower_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    shared = exact.keys() & machine.FLOORS.keys()
    assert {"torch", "onnx", "pillow", "onnxruntime", "timm"} <= shared
    for name in shared:
        assert version_numbers(exact[name]) >= version_numbers(machine.FLOORS[name]), name


def test_doctor_names_a_package_below_its_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"onnx": "1.21.0", "pillow": "12.2.0", "tensorrt": "10.16.1.11", "torch": "2.11.0+cu126"}
    pretend_versions(monkeypatch, older)
    found = findings()
    assert found["onnx"]["found"] == "1.21.0, older than 1.22"
    assert "onnx/onnx#7790" in found["onnx"]["disables"]
    assert "CVE-2026-34445" not in found["onnx"]["disables"], "closed in 1.21"
    assert found["pillow"]["disables"] == "published fixes are missing"
    assert "a plan runs code (CVE-2026-24227" in found["tensorrt"]["disables"]
    assert found["onnx"]["remedy"] == "pip install --upgrade 'onnx>=1.22'"
    assert found["pillow"]["remedy"] == "pip install --upgrade 'pillow>=12.3'"
    assert found["torch"] == {"what": "torch", "found": "2.11.0+cu126", "disables": "", "remedy": ""}
    assert "for servers that have TensorRT 10" in found["tensorrt"]["disables"]


def test_doctor_names_vulnerabilities_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"torch": "2.5.1+cu124", "onnx": "1.17.0", "pillow": "12.1.9", "onnxruntime": "1.24.0", "numpy": "1.16.2"}
    pretend_versions(monkeypatch, older)
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.5")
    found = findings()
    named = {
        "torch": ("CVE-2025-32434", "CVE-2026-24747"),
        "onnx": ("CVE-2025-51480", "CVE-2026-34445", "CVE-2026-34446", "CVE-2026-34447", "CVE-2026-27489"),
        "pillow": ("CVE-2026-25990", "CVE-2026-42311", "CVE-2026-40192"),
        "onnxruntime": ("microsoft/onnxruntime#26776",),
        "numpy": ("CVE-2019-6446",),
        "python": ("CVE-2025-8194", "CVE-2026-82049"),
    }
    for package, names in named.items():
        assert all(name in found[package]["disables"] for name in names), found[package]
    assert "CVE-2022-25882" not in found["onnx"]["disables"]
    assert "CVE-2025-4517" not in found["python"]["disables"]
    assert found["python"]["remedy"] == "install Python 3.13.16 or newer"


def test_lower_bounds_exclude_known_vulnerabilities() -> None:
    for hole in vulnerabilities.LIBRARIES:
        if hole.package in machine.FLOORS:
            assert not hole.affects(machine.FLOORS[hole.package]), hole
        assert hole.identifiers
        assert all(re.fullmatch(r"CVE-\d{4}-\d{4,}|[\w-]+/[\w-]+#\d+", name) for name in hole.identifiers)
    for holes in (vulnerabilities.LIBRARIES, vulnerabilities.SERVER):
        for package in {hole.package for hole in holes}:
            closed = [version_numbers(hole.fixed_in) for hole in holes if hole.package == package]
            assert closed == sorted(closed), "the last one of a package is the newest"


@pytest.mark.parametrize("vnni", [True, False, None])
def test_doctor_explains_missing_vnni(monkeypatch: pytest.MonkeyPatch, vnni: bool | None) -> None:
    monkeypatch.setattr(machine, "has_vnni", lambda: vnni)
    row = findings().get("VNNI")
    assert (row is None) is (vnni is None)
    if row is None:
        return
    assert bool(row["found"]) is vnni
    assert row["remedy"] == ("" if vnni else "export them with --weight-bits 7")
    assert ("INT8 graphs in ONNX Runtime on this CPU" in row["disables"]) is not vnni
