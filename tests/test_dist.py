"""What is published: wheel and source distribution, their metadata, the floors, and what was installed from them."""

import json
import re
import tarfile
import time
import tomllib
from pathlib import Path

import click
import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from benchmarks.release import floors, installs, sdist
from benchmarks.release.wheel import tracked
from corp_deploy import __version__, machine
from ground.files import sha256_of_file
from ground.vulnerabilities import version_numbers

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
EPOCH = 1_700_000_000
STEM = f"corp_deploy-{__version__}"
PROMISED = {"cpu", "gpu", "rtx", "hf", "openvino", "interop", "sign"}
NO_GIT = "what belongs to the source distribution is what git has, and there is no git here"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, and the wheel once more: of-tree/*.whl, *.tar.gz, unpacked/*, of-sdist/*.whl."""
    if not (ROOT / ".git").exists():
        pytest.skip(NO_GIT)
    place = tmp_path_factory.mktemp("dist")
    sdist.both(place, EPOCH)
    return place


@pytest.fixture(scope="module")
def wheel(scratch: Path) -> Path:
    return scratch / "of-tree" / f"{STEM}-py3-none-any.whl"


@pytest.fixture(scope="module")
def core(wheel: Path) -> bytes:
    return sdist.metadata(wheel)


@pytest.mark.slow("process")
def test_wheel_from_the_sdist_equals_that_of_the_tree(scratch: Path, wheel: Path) -> None:
    again = scratch / "of-sdist" / wheel.name
    assert sha256_of_file(again) == sha256_of_file(wheel)


@pytest.mark.slow("process")
def test_different_wheel_from_the_sdist_is_refused(
    tmp_path: Path, scratch: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(source: Path, into: Path, _: int) -> Path:
        into.mkdir()
        (into / wheel.name).write_bytes(wheel.read_bytes() + (b"" if source.name == "tree" else b"?"))
        return into / wheel.name

    monkeypatch.setattr(sdist, "build", built)
    with pytest.raises(click.ClickException, match=r"built from corp_deploy-.*\.tar\.gz it has other bytes"):
        sdist.both(tmp_path, EPOCH)


@pytest.mark.slow("process")
def test_sdist_contains_the_commit_and_no_packer(scratch: Path) -> None:
    with tarfile.open(scratch / f"{STEM}.tar.gz") as archive:
        members = {member.name.removeprefix(f"{STEM}/"): member for member in archive}
    assert members.keys() == {"PKG-INFO", *tracked()}
    assert {
        "Makefile", "constraints.txt", "tests/test_dist.py", "mkdocs.yml", "benchmarks/release/sdist.py",
    } <= members.keys()  # fmt: skip
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members.values()} == {(EPOCH, 0, 0, "")}
    assert {name for name, member in members.items() if member.issym()} == {"examples/digits"}
    executable = {name for name, member in members.items() if member.isfile() and member.mode & 0o111}
    assert executable == {".ci/run", "examples/ci/release.sh"}


@pytest.mark.slow("process")
def test_sdist_is_reproducible(tmp_path: Path, scratch: Path, wheel: Path) -> None:
    first = scratch / f"{STEM}.tar.gz"
    time.sleep(max(0.0, 1.1 - (time.time() - first.stat().st_mtime)))  # times in a tar have steps of a second
    assert sdist.write_sdist(wheel, tmp_path, EPOCH).read_bytes() == first.read_bytes()
    assert sdist.write_sdist(wheel, tmp_path, EPOCH + 1).read_bytes() != first.read_bytes()


@pytest.mark.slow("process")
def test_metadata_is_valid_and_complete(core: bytes) -> None:
    said = Metadata.from_email(core, validate=True)
    assert (said.name, str(said.version), str(said.license_expression)) == ("corp-deploy", __version__, "Apache-2.0")
    assert set(said.license_files or ()) == {"LICENSE"}
    assert set(said.provides_extra or ()) >= PROMISED
    assert floors.extras(core) == set(said.provides_extra or ())
    assert said.description_content_type == "text/markdown"
    assert (said.description or "").strip() == (ROOT / "README.md").read_text().strip()
    assert said.requires_python is not None
    newest = max(re.findall(r"3\.\d+", " ".join(said.classifiers or ())), key=lambda text: int(text[2:]))
    assert {"3.11", newest} <= {each for each in ("3.11", "3.12", "3.13") if said.requires_python.contains(each)}
    assert not said.requires_python.contains("3.10")


@pytest.mark.slow("process")
def test_lower_bounds_equal_those_of_doctor(core: bytes) -> None:
    used = floors.floors(floors.requirements(core, *floors.extras(core) - floors.DEVELOPING))
    assert used == dict(machine.FLOORS)
    held = {each.name: each for each in map(Requirement, floors.constraints(core).splitlines())}
    for name, version in used.items():
        assert str(held[name].specifier) == f"=={version}"
    assert held["setuptools"].specifier.contains("77.0.1")
    assert {"grimp", "mkdocs", "pytest", "scipy"} <= held.keys()
    assert not floors.LINTERS & held.keys()


def test_requirement_without_a_single_lower_bound_is_refused() -> None:
    assert floors.floors([Requirement("A.b>=1.2; python_version > '3'"), Requirement("a-b>=1.2")]) == {"a-b": "1.2"}
    for line in ("a", "a==1", "a>=1,<2", "a~=1.0"):
        with pytest.raises(click.ClickException, match="a: expected one lower bound"):
            floors.floors([Requirement(line)])
    with pytest.raises(click.ClickException, match="a: two floors, 1 and 2"):
        floors.floors([Requirement("a>=1"), Requirement("A>=2")])


def test_requirements_follow_the_requested_extras() -> None:
    core = b"""Metadata-Version: 2.4
Name: some
Version: 1
Provides-Extra: x
Requires-Dist: always>=1
Requires-Dist: of-x>=2; extra == "x"
Requires-Dist: elsewhere>=3; sys_platform == "no such" and extra == "x"
"""
    assert [each.name for each in floors.requirements(core)] == ["always"]
    assert [each.name for each in floors.requirements(core, "x")] == ["always", "of-x"]


def test_steps_end_at_the_first_failure(tmp_path: Path) -> None:
    *_, done = installs.run({"well": ["true"], "badly": ["sh", "-c", "exit 3"], "never": ["true"]}, tmp_path)
    assert [(each["step"], each["exit_code"]) for each in done] == [("well", 0), ("badly", 3)]


def test_outcome_counts_pytests_report(tmp_path: Path) -> None:
    cases = "".join(
        f'<testcase classname="tests.test_a" name="{name}">{inside}</testcase>'
        for name, inside in (("good", ""), ("bad", "<failure/>"), ("broken", "<error/>"), ("left", "<skipped/>"))
    )
    counts = 'tests="4" failures="1" errors="1" skipped="1"'
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite {counts}>{cases}</testsuite></testsuites>")
    assert installs.outcome(tmp_path / "junit.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failing": ["tests.test_a::bad", "tests.test_a::broken"],
    }


def test_recorded_lowest_and_highest_versions_passed() -> None:
    record = json.loads(installs.RECORD.read_text())
    assert record["kind"] == installs.KIND
    for name, part in record["environments"].items():
        assert [each["step"] for each in part["steps"]][:5] == ["install", "pip check", "doctor", "demo", "manifest"], (
            name
        )
        assert {each["exit_code"] for each in part["steps"]} == {0}, name
        assert part.get("tests", {}).get("failing", []) == [], name
        assert set(part["extras"]) == PROMISED - {"gpu"} | {"demo"}
    lowest, highest = (record["environments"][name] for name in ("lowest", "highest"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_extras = (each for extra in lowest["extras"] for each in project["optional-dependencies"][extra])
    named = [*project["dependencies"], *of_extras]
    asked = {Requirement(each).name for each in named}
    for name, floor in machine.FLOORS.items():
        if name in lowest["packages"] and name in asked:  # others, such as torch's own fsspec, are as new as may be
            numbers = version_numbers(floor)
            assert version_numbers(lowest["packages"][name])[: len(numbers)] == numbers, f"{name}: run make lowest"
    assert lowest["python"].startswith("3.11.")
    assert highest["packages"]["torch"] != lowest["packages"]["torch"]
