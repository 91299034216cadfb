"""Stages: what makes one run again, kills at every file operation, the lock, a full disk."""

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corp_deploy.release.incremental import STATE, Outcome, Stage, StageDirs, locked, plan, run
from ground.errors import BadInput
from ground.files import sha256_of_file
from tests.killing import fake_stages, tree

ROOT = Path(__file__).parents[1]


def finished(stages: list[Stage], root: Path) -> Outcome:
    with locked(root):
        return run(stages, root, starts=lambda stage, why: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("source")
    return path


@pytest.fixture
def root(tmp_path: Path, source: Path) -> Path:
    finished(fake_stages(source), tmp_path / "out")
    return tmp_path / "out"


def states(stages: list[Stage], root: Path) -> dict[str, str]:
    return {row.stage: row.state for row in plan(stages, root)}


def test_a_second_run_makes_nothing(root: Path, source: Path) -> None:
    before = tree(root)
    assert finished(fake_stages(source), root).finished == ()
    assert tree(root) == before
    assert set(states(fake_stages(source), root).values()) == {"cached"}


def test_a_setting_runs_its_stage_and_what_comes_out_different(root: Path, source: Path) -> None:
    stages = fake_stages(source)
    stages[1] = replace(stages[1], settings={"number": 7})
    assert states(stages, root) == {"one": "cached", "two": "runs", "three": "cached", "last": "follows"}
    assert finished(stages, root).finished == ("two",), "two.bin came out the same, so nothing that reads it runs"


def test_a_changed_file_outside_runs_all_that_follows_it(root: Path, source: Path) -> None:
    source.write_text("another source")
    rows = {row.stage: row.why for row in plan(fake_stages(source), root)}
    assert rows["one"] == "changed: source"
    assert finished(fake_stages(source), root).finished == ("one",)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.unlink(), "two.bin is gone"),
        (lambda path: path.write_bytes(b"other"), "two.bin was changed after it was made"),
    ],
)
def test_a_lost_or_changed_output_is_made_again(
    root: Path, source: Path, harm: Callable[[Path], object], why: str
) -> None:
    before = tree(root)
    harm(root / "two.bin")
    assert {row.stage: row.why for row in plan(fake_stages(source), root)}["two"] == why
    assert finished(fake_stages(source), root).finished == ("two",)
    assert tree(root) == before


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[" * 100_000, "{}", '{"kind": "corp-deploy/stamp", "version": 2, "inputs": {}, "outputs": {}}'),
        '{"kind": "corp-deploy/stamp", "version": 1, "inputs": {}, "outputs": {"folder/three.bin": 3}}',
    ],
)
def test_a_damaged_stamp_counts_as_none(root: Path, source: Path, text: str) -> None:
    (root / STATE / "three.json").write_text(text)
    assert finished(fake_stages(source), root).finished == ("three",)


def test_damaged_digests_count_as_none(root: Path, source: Path) -> None:
    (root / STATE / "digests.json").write_text('{"kind": "corp-deploy/digests", "version": 1, "files": {"a": 1}}')
    assert finished(fake_stages(source), root).finished == ()


def test_a_stamp_can_be_read(root: Path) -> None:
    """As every release wrote it so far."""
    stamp = json.loads((root / STATE / "two.json").read_text())
    assert list(stamp) == ["kind", "version", "inputs", "outputs"]
    assert (stamp["kind"], stamp["version"], stamp["inputs"]["number"]) == ("corp-deploy/stamp", 1, "1")
    assert stamp["outputs"] == {"two.bin": sha256_of_file(root / "two.bin")}


def test_a_changed_output_of_equal_size_and_time_is_still_seen_when_it_is_young(root: Path, source: Path) -> None:
    """Right after a run nothing is remembered by its time alone."""
    path = root / "two.bin"
    content = path.read_bytes()
    path.write_bytes(bytes(reversed(content)))
    assert finished(fake_stages(source), root).finished == ("two",)


def test_files_of_stages_that_are_gone_are_removed_and_a_users_are_not(root: Path, source: Path) -> None:
    (root / "mine.txt").write_text("mine")
    (root / "manifest.txt").write_text("edited")
    finished(fake_stages(source)[:2], root)
    assert not (root / "folder/three.bin").exists()
    assert (root / "manifest.txt").exists(), "somebody wrote into it"
    assert (root / "mine.txt").exists()
    assert (root / "folder/one.bin").exists()


def test_what_this_machine_lacks_stops_only_what_reads_it(tmp_path: Path, source: Path) -> None:
    stages = fake_stages(source)
    stages[1] = replace(stages[1], missing=lambda: "no GPU")
    outcome = finished(stages, tmp_path / "out")
    assert outcome.finished == ("one", "three")
    assert outcome.blocked == {"two": "no GPU", "last": "waits for two"}
    assert states(stages, tmp_path / "out")["last"] == "blocked"
    outcome = finished(fake_stages(source), tmp_path / "out")
    assert outcome.finished == ("two", "last")
    assert finished(stages, tmp_path / "out").blocked == {}, "done elsewhere is done"


@pytest.mark.slow("process")
def test_a_run_killed_at_any_file_operation_ends_with_the_same_bytes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.killing", "fake", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 60, done.stdout
    assert [line for line in lines if not line.endswith("same")] == []


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BadInput, match=r"another release \(process \d+\) works in this directory"):  # noqa: SIM117
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_error_and_leaves_no_half_file(root: Path, source: Path, error: Exception) -> None:
    def full(place: StageDirs) -> None:
        (place.into / "two.bin").write_bytes(b"half")
        raise error

    before = tree(root)
    stages = fake_stages(source)
    stages[1] = replace(stages[1], run=full, settings={"number": 9})
    with pytest.raises(OSError, match="stage two") as caught:
        finished(stages, root)
    assert caught.value.errno == (errno.EFBIG if "large" in str(error) else errno.ENOSPC)
    assert tree(root) == before
    assert not (root / STATE / "work").exists()


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.txt: no such file or folder"):
        finished(fake_stages(tmp_path / "nowhere.txt"), tmp_path / "out")


def test_a_folder_is_what_its_names_and_files_are(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"1")
    stages = fake_stages(folder)
    finished(stages, tmp_path / "out")
    (folder / "a.png").rename(folder / "b.png")
    assert finished(stages, tmp_path / "out").finished == ("one",)
    (tmp_path / "x-00.tar").write_bytes(b"1")
    assert finished(fake_stages(tmp_path / "x-{00..00}.tar"), tmp_path / "out").finished == ("one",)
