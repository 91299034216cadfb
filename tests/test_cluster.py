"""A calibration on a cluster loses no image and doubles none, whichever process is killed or started twice.

The scripts are those of the pages on Ray and Slurm.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import corp_deploy
from calib.moments import Moments
from calib.store import load_moments
from tests.pages import DOCS, ROOT, blocks, follow
from tests.sums import assert_equal
from tests.test_docs_pages import digits

MODEL = ROOT / "examples" / "digits" / "model"


def page(name: str) -> Path:
    return DOCS / "how-to" / name


def write_scripts(name: str, home: Path) -> None:
    for block in blocks(page(name)):
        if block.file is not None:
            (home / block.file).write_text(block.text, encoding="utf-8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digits(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_all_images_once(found: Moments, home: Path) -> None:
    """Hold moments against those of one process over all images."""
    images = np.load(home / "images.npz")["images"]
    whole = corp_deploy.calibrate(MODEL, images, home / "whole.safetensors").moments
    assert whole.images == len(images)
    assert_equal(found, whole, 1e-6)


@pytest.fixture
def ray_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Ray start quickly, reach no network, and leave no file in the home directory."""
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets have at most 107 characters
        # Each process of Ray imports jsonschema, which compiles a grammar for seconds if this package is there.
        (Path(short) / "rfc3987_syntax.py").write_text("raise ImportError\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), short)))
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        yield


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_ray_page_runs_as_written(home: Path, ray_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(page("ray.md"), home, monkeypatch)
    assert_all_images_once(load_moments(home / "moments.safetensors"), home)


KILLING = """
import os
from pathlib import Path

import numpy as np
import ray

import collect

marks = Path.cwd()


class Killed(collect.Collect):
    def __call__(self, batch):
        if first("collected"):
            self.collector.update(batch["data"][:8])
            os._exit(1)
        row = super().__call__(batch)
        if first("written"):
            os._exit(1)
        return row


def first(event):
    try:
        (marks / event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


blocks = np.array_split(np.load("images.npz")["images"], 4)
images = ray.data.from_numpy([*blocks, blocks[1]])
collect.calibrate(images, "examples/digits/model", "moments.safetensors", collect=Killed)
"""


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_killed_actors_and_a_repeated_batch_give_each_image_once(home: Path, ray_variables: None) -> None:
    write_scripts("ray.md", home)
    (home / "killing.py").write_text(KILLING)
    done = subprocess.run(
        [sys.executable, "killing.py"], cwd=home, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (home / "collected").exists()
    assert (home / "written").exists()
    assert len(list((home / "moments.parts").iterdir())) == 4
    assert_all_images_once(load_moments(home / "moments.safetensors"), home)


DYING = """#!{python}
import os, signal, sys


def hook(event, words):
    if event == "os.rename" and str(words[1]).endswith("of-4.safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(hook)
from corp_deploy.__main__ import main
main()
"""


def run_task(home: Path, index: int, before: str = "") -> int:
    """Run a task of the array job as Slurm does, with programs in the folder `before` before all others."""
    path = os.pathsep.join((str(home / before), str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": "4", "PATH": path}
    script = "calibrate.sh" if index else "merge.sh"
    environment = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(["sh", script], cwd=home, env=environment, capture_output=True, check=False).returncode


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_array_job_with_a_killed_and_a_repeated_task_has_each_image_once(home: Path) -> None:
    write_scripts("slurm.md", home)
    script = (home / "calibrate.sh").read_text()
    often = script.replace("--checkpoint-every 10000", "--batch-size 8 --checkpoint-every 16")
    (home / "calibrate.sh").write_text(often)
    (home / "dying").mkdir()
    (home / "dying" / "corp-deploy").write_text(DYING.format(python=sys.executable))
    (home / "dying" / "corp-deploy").chmod(0o755)
    for index in (1, 2, 2, 4):
        assert run_task(home, index) == 0
    assert run_task(home, 3, before="dying") == 128 + 9
    assert sorted(path.name for path in (home / "parts").glob("3-*")) == ["3-of-4.partial.safetensors"]
    assert run_task(home, 0) != 0, "a part is missing"
    assert not (home / "moments.safetensors").exists()
    assert run_task(home, 3) == 0
    assert run_task(home, 0) == 0
    assert_all_images_once(load_moments(home / "moments.safetensors"), home)
