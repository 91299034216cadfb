"""The Dockerfiles and the dev container, as far as they can be read: nothing is built here."""

import fnmatch
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml

from benchmarks.release.wheel import PARTS
from corp_deploy import __version__

ROOT = Path(__file__).parents[1]
IMAGE, WORKPLACE = ROOT / "Dockerfile", ROOT / ".devcontainer" / "Dockerfile"
LINTER = ROOT / "build" / "dist-tools" / "bin" / "hadolint"
# Of the Development Container specification, those that a container of one Dockerfile may have.
KEYS = {
    "name", "build", "remoteUser", "containerUser", "containerEnv", "remoteEnv", "forwardPorts", "postCreateCommand",
    "postStartCommand", "customizations", "features", "mounts", "runArgs", "updateRemoteUserUID",
}  # fmt: skip
Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """Each with its words, lines that go on put together, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    whole = [line.strip() for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name.upper(), words.strip()) for name, _, words in (line.partition(" ") for line in whole)]


def of(name: str, path: Path = IMAGE) -> list[str]:
    return [words for each, words in instructions(path.read_text()) if each == name]


def kept_out(name: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a file from the build: the last pattern decides that fits it or a directory of it.

    Patterns of one part, at the top or, behind **/, anywhere.
    """
    out = False
    places = [PurePosixPath(name), *PurePosixPath(name).parents][:-1]
    for pattern in patterns:
        part = pattern.removeprefix("!").removeprefix("**/")
        assert "/" not in part, pattern
        anywhere = "**/" in pattern
        if any(fnmatch.fnmatchcase(each.name, part) and (anywhere or len(each.parts) == 1) for each in places):
            out = not pattern.startswith("!")
    return out


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def copied() -> set[str]:
    """The sources of COPY in the tree."""
    words = [shlex.split(each) for each in of("COPY") if not each.startswith("--from=")]
    return {source for *sources, _ in words for source in sources}


@pytest.mark.parametrize("path", [IMAGE, WORKPLACE], ids=["image", "workplace"])
def test_base_images_are_pinned_and_users_are_not_root(path: Path) -> None:
    bases = {words.split()[0] for words in of("FROM", path)}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+(-slim)?-[a-z]+", bases.pop())
    user, group = of("USER", path)[-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    for words in of("RUN", path):
        subprocess.run(["sh", "-n", "-c", words], check=True)


def test_copied_paths_exist_and_are_in_the_build_context() -> None:
    assert copied() == {*PARTS, "constraints.txt"}
    patterns = ignored()
    for name in copied():
        place = ROOT / name
        assert place.exists(), name
        files = [place] if place.is_file() else [each for each in place.rglob("*") if each.is_file()]
        for file in files:
            cached = "__pycache__" in file.parts
            assert kept_out(file.relative_to(ROOT).as_posix(), patterns) is cached, file
    for name in (".git/HEAD", ".venv/bin/python", "build/site/index.html", "dist/a.whl", "tests/conftest.py"):
        assert kept_out(name, patterns), name


def test_image_installs_existing_extras_and_runs_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = (shlex.split(words) for words in of("RUN") if " install " in words)
    assert install[0].startswith("/opt/corp-deploy/bin/")
    assert install[install.index("--constraint") + 1] == "constraints.txt"
    extras = set(install[-1].removeprefix(".[").removesuffix("]").split(","))
    assert {"cpu", "demo"} <= extras <= project["optional-dependencies"].keys()
    assert not extras & {"gpu", "rtx", "dev", "docs"}
    assert json.loads(of("ENTRYPOINT")[0])[0] in project["scripts"]
    assert json.loads(of("CMD")[0]) == ["--help"]
    assert of("HEALTHCHECK") == ["NONE"]
    assert any("/opt/corp-deploy/bin:" in words for words in of("ENV"))
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', of("LABEL")[0]))
    assert (labels["version"], labels["licenses"]) == (__version__, project["license"])


def test_dev_container_is_valid() -> None:
    content = json.loads((WORKPLACE.parent / "devcontainer.json").read_text())
    assert content.keys() <= KEYS
    assert (WORKPLACE.parent / content["build"]["dockerfile"]).samefile(WORKPLACE)
    assert f"useradd --create-home --shell /bin/bash --uid 1000 {content['remoteUser']}" in of("RUN", WORKPLACE)
    program, target = content["postCreateCommand"].split()
    assert program == "make"
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = {"charliermarsh.ruff", "ms-python.mypy-type-checker", "ms-python.python"}
    assert set(content["customizations"]["vscode"]["extensions"]) == wanted
    assert content["customizations"]["vscode"]["settings"]["python.testing.pytestEnabled"] is True


def test_ci_example_runs_the_release_in_the_image() -> None:
    job = yaml.safe_load((ROOT / "examples" / "ci" / "container.yml").read_text())["jobs"]["release"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    for step in steps:
        subprocess.run(["sh", "-n", "-c", step], check=True)
    assert "latest" not in job["env"]["IMAGE"]
    script = shlex.split(steps[-1])[shlex.split(steps[-1]).index("$IMAGE") + 1]
    assert (ROOT / "examples" / script).is_file()


def test_hadolint_finds_nothing() -> None:
    if not LINTER.exists():
        pytest.skip("hadolint is not installed: make build/dist-tools/ready")
    done = subprocess.run([LINTER, IMAGE, WORKPLACE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_nightly_example_remeasures_and_runs_no_foreign_code() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "nightly.yml").read_text())
    job = workflow["jobs"]["timing"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    for step in steps:
        subprocess.run(["sh", "-n", "-c", step], check=True)
    assert "--again 'bench.*'" in next(step for step in steps if "release.sh" in step)
    assert "head.repo.full_name == github.repository" in job["if"]
    assert all("github.event" not in step for step in steps), "texts of a pull request are no part of a script"
