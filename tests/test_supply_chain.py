"""What is installed: by digest, under licences that may be, told in a bill of materials."""

import hashlib
import json
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from benchmarks.release import licences, lock
from benchmarks.release.licences import Policy, pinned, policy
from corp_deploy.release.sbom import bill_of_environment
from corp_deploy.release.sbom import licences as told_licences
from ground.installed import InstalledPackage, installed_packages

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def packages() -> tuple[InstalledPackage, ...]:
    return installed_packages()


def package(name: str, licence: str, *requires: str) -> InstalledPackage:
    return InstalledPackage(name=name, version="1.0", licence=licence, requires=requires)


def test_installed_packages_follow_their_metadata(packages: tuple[InstalledPackage, ...]) -> None:
    by_name = {each.name: each for each in packages}
    assert [each.name for each in packages] == sorted(by_name)
    for name in ("torch", "jinja2", "tomli-w"):
        assert by_name[name].version == version(name)
    asked = {"click", "jinja2", "msgspec", "numpy", "torch"}
    assert asked <= set(by_name["corp-deploy"].requires)
    assert not {"pytest", "openvino"} & set(by_name["corp-deploy"].requires), "extras are no need"
    assert distribution("corp-deploy").metadata["License-Expression"] == "Apache-2.0"
    assert (by_name["jinja2"].licence, by_name["click"].licence) == ("BSD-3-Clause", "BSD-3-Clause")


def test_every_licence_is_allowed_and_documented(packages: tuple[InstalledPackage, ...]) -> None:
    ours, by = licences.ours(), policy()
    assert licences.refused(ours, by) == []
    rows = {tuple(line.strip("| ").split(" | ")) for line in licences.PAGE.read_text().splitlines()}
    here = {each for each in ours if pinned()[each.name] == each.version}
    missing = [each.name for each in here if (each.name, each.version, by.licence(each)) not in rows]
    assert missing == [], "run python -m benchmarks.release.licences"
    assert {row[0] for row in rows} >= pinned().keys()


@pytest.mark.parametrize(
    ("expression", "may_be"),
    [("MIT", True), ("GPL-3.0-only", False), ("MIT AND GPL-3.0-only", False), ("MIT OR GPL-3.0-only", True),
     ("MIT AND BSD-2-Clause OR GPL-3.0-only", True), ("GPL-3.0-only OR MIT AND AGPL-3.0-only", False), ("", False)],
)  # fmt: skip
def test_licence_expression_needs_one_allowed_alternative(expression: str, may_be: bool) -> None:
    by = Policy(allowed={"MIT": "", "BSD-2-Clause": ""}, unsaid={"quiet": "MIT"})
    assert by.allows(expression) is may_be
    assert licences.refused([package("loud", expression), package("quiet", "")], by) == (
        [] if may_be else [f"loud 1.0: {expression or 'says no licence'}"]
    )


def test_lock_file_has_a_digest_of_every_pinned_version() -> None:
    text = lock.LOCK.read_text(encoding="utf-8")
    locked = lock.digests_from_text(text)
    assert lock.unlike(locked, pinned()) == [], "run make lock"
    assert "://" not in text, "an index of its own has no place in it"
    name, asked = next((name, asked) for (name, asked) in locked)
    assert lock.unlike(locked, {name: "0.0.0"}) == [
        f"{name}==0.0.0: not in requirements.lock",
        f"{name}=={asked}: constraints.txt has 0.0.0",
    ]
    assert lock.unlike({("a", "1"): set()}, {"a": "1"}) == ["a==1: no digest"]


def test_file_with_wrong_digest_is_found() -> None:
    text = f"A_b[extra]==1.0 ; python_version > '3' \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    locked = lock.digests_from_text(text)
    assert locked == {("a-b", "1.0"): {"a" * 64, "b" * 64}}

    def report(digest: str) -> dict[str, object]:
        info = {"archive_info": {"hashes": {"sha256": digest}}}
        return {"install": [{"metadata": {"name": "a.B", "version": "1.0"}, "download_info": info}]}

    assert lock.foreign(report("b" * 64), locked) == []
    assert lock.foreign(report("c" * 64), locked) == [f"a-b==1.0: sha256 {'c' * 64}, in no line of requirements.lock"]


def test_sbom_of_the_environment_is_valid_cyclonedx(packages: tuple[InstalledPackage, ...]) -> None:
    bill = bill_of_environment(packages)
    assert bill == bill_of_environment(packages), "nothing in it is of the time"
    assert {each["name"] for each in bill["components"]} == {each.name for each in packages} - {"corp-deploy"}
    digest = hashlib.sha256((distribution("torch").read_text("RECORD") or "").encode()).hexdigest()
    (torch,) = (each for each in bill["components"] if each["name"] == "torch")
    assert torch["components"][0]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    needs = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert f"pkg:pypi/torch@{version('torch')}" in needs["corp-deploy"]
    assert f"pkg:pypi/markupsafe@{version('markupsafe')}" in needs[f"pkg:pypi/jinja2@{version('jinja2')}"]
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    schema = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_6
    validator = validation.JsonStrictValidator(schema)
    assert validator.validate_str(json.dumps(bill)) is None
    bill["components"] = [{**bill["components"][0], "licenses": [{"expression": "MIT", "why": "?"}]}]
    assert validator.validate_str(json.dumps(bill)) is not None


def test_licences_are_spdx_expressions_or_names() -> None:
    assert told_licences("MIT OR Apache-2.0") == [{"expression": "MIT OR Apache-2.0"}]
    assert told_licences("LicenseRef-NVIDIA-Proprietary") == [{"license": {"name": "NVIDIA-Proprietary"}}]
    assert told_licences("mit AND LicenseRef-ours") == [{"expression": "MIT AND LicenseRef-ours"}]
    assert told_licences("Apache2") == [{"license": {"name": "Apache2"}}]
    assert told_licences("") == []
