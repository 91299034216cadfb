"""The built wheel is whole: somewhere else, with the repository out of reach, it writes a report and goes the way of
the start page, from the example that came along to a model that a real server serves.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.pages import DOCS, blocks, lacking, run_line
from tests.triton_server import Server, lack

ROOT = Path(__file__).parents[1]
ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")
UNTRACKED = shutil.ignore_patterns("__pycache__", "*.egg-info")
# The lines of the start page, one after the other.
FOLLOWED = """
import shlex, sys
sys.path.append(sys.argv[1])
from tests.tracing import trace_as_tests_do
sys.path.pop()
trace_as_tests_do()
import torch
torch.set_num_threads(1)
sys.stderr = sys.stdout
from corp_deploy.cli import main
for line in open(sys.argv[2]):
    code = main(shlex.split(line), standalone_mode=False)
    # The gate of `ship` judges times, of which a busy machine tells too little.
    assert not code or (code == 3 and line.startswith("ship ")), f"{line} exits with {code}"
"""
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as building writes beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=UNTRACKED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment(), cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def clean_environment() -> dict[str, str]:
    """Without the ways by which this run finds the repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel, and this one's other packages from where they are.

    A directory named in a .pth file is searched, but .pth files in it are not read: an editable install stays out.
    """
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return home / "bin" / "python"


def run(python: Path, *words: str, cwd: Path) -> str:
    command = [str(python), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=clean_environment(), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow("process")
def test_wheel_contains_every_package_file(wheel: Path) -> None:
    """Templates, styles, tables and the example's model among them; nothing else is."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    assert names == {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    models = {f"corp_deploy/demo/digits/{folder}/model.safetensors" for folder in ("model", "resnet")}
    assert {"perf/report/templates/page.css", *models} <= names


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_packages_are_imported_from_the_wheel(python: Path, tmp_path: Path) -> None:
    for name, place in zip(ROOMS, run(python, "-c", LOADED, *ROOMS, cwd=tmp_path).splitlines(), strict=True):
        assert Path(place).is_relative_to(python.parents[1]), name


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_help_and_version_work(python: Path, tmp_path: Path) -> None:
    assert "Usage:" in run(python, "-m", "corp_deploy", "--help", cwd=tmp_path)
    assert "corp-deploy 0." in run(python, "-m", "corp_deploy", "--version", cwd=tmp_path)


@pytest.fixture(scope="module")
def started(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the start page was followed from the wheel, command by command."""
    home, lines, shown = tmp_path_factory.mktemp("start"), [], ""
    for block in blocks(DOCS / "start.md"):
        assert (block.exits, block.needs) == (0, None)
        if block.file is not None:
            (home / block.file).write_text(block.text)
        elif block.kind == "console":
            for line, below in block.steps:
                shown += below
                if line.startswith("pip install "):
                    run_line(line, 0)
                else:
                    lines.append(line.removeprefix("corp-deploy "))
    (home / "lines").write_text("\n".join(lines))
    printed = run(python, "-c", FOLLOWED, str(ROOT), "lines", cwd=home)
    assert "15 of 18 sites reduced" in shown
    absent = lacking(shown, printed)
    assert not absent, f"{absent} of the start page is not printed:\n{printed}"
    return home


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_start_page_works_from_the_wheel(started: Path) -> None:
    for name in ("start/reduced/model.fp16.onnx", "start/parity.json", "start/gate.json", "repository/expected.json"):
        assert (started / name).is_file()
    assert str(ROOT) not in (started / "start" / "report.html").read_text(encoding="utf-8")


REASON = lack()


@pytest.mark.nightly
@pytest.mark.slow("process", "server")
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_server_answers_as_the_start_page_says(
    started: Path, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Server(started / "repository", tmp_path_factory.mktemp("server")) as server:
        server.load("digits_cpu")
        printed = run(python, "ask.py", server.http_address, cwd=started)
    served, labels = (line.split(": ")[1] for line in printed.splitlines())
    assert served == labels
