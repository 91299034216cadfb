"""Stages of a release: reruns, kills at every file operation, the lock, full disks and timing records."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from corp_deploy.machine import versions
from corp_deploy.proof.report_input import effort_lines
from corp_deploy.release import targets
from corp_deploy.release.digests import files_of
from corp_deploy.release.incremental import (
    AGAIN,
    STATE,
    Outcome,
    Stage,
    StageDirs,
    locked_release,
    run_stages,
    stage_statuses,
)
from corp_deploy.release.pace import efforts_in, efforts_of, timed
from corp_deploy.release.recipe_tables import ExportTable, TargetTable
from corp_deploy.release.targets import machine_facts, release_target
from corp_deploy.store.manifest import EffortRecord, Efforts, Step
from ground.effort import Effort, Stopwatch, measure_effort
from ground.errors import BadInput
from ground.files import sha256_of_file, write_text
from perf.timing.watch import cpu_name
from tests.command import invoked, refuses
from tests.killing import fake_stages, tree
from tests.refusals import rejects

ROOT = Path(__file__).parents[1]


def finish_stages(stages: Sequence[Stage], root: Path) -> Outcome:
    root.mkdir(exist_ok=True)
    with locked_release(root):
        return run_stages(stages, root, starts=lambda stage, why: None, every=stages)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("source")
    return path


@pytest.fixture
def root(tmp_path: Path, source: Path) -> Path:
    finish_stages(fake_stages(source), tmp_path / "out")
    return tmp_path / "out"


def states(stages: list[Stage], root: Path) -> dict[str, str]:
    return {row.stage: row.state for row in stage_statuses(stages, root)}


def test_second_run_rebuilds_nothing(root: Path, source: Path) -> None:
    before = tree(root)
    assert finish_stages(fake_stages(source), root).finished == ()
    assert tree(root) == before
    assert set(states(fake_stages(source), root).values()) == {"cached"}


def test_changed_setting_reruns_its_stage_and_affected_ones(root: Path, source: Path) -> None:
    stages = fake_stages(source)
    stages[1] = replace(stages[1], settings={"number": 7})
    assert states(stages, root) == {"one": "cached", "two": "runs", "three": "cached", "last": "follows"}
    assert finish_stages(stages, root).finished == ("two",), "two.bin came out the same, so nothing that reads it runs"


def test_changed_input_file_reruns_dependent_stages(root: Path, source: Path) -> None:
    source.write_text("another source")
    rows = {row.stage: row.why for row in stage_statuses(fake_stages(source), root)}
    assert rows["one"] == "changed: source"
    assert finish_stages(fake_stages(source), root).finished == ("one",)


def test_lost_or_changed_output_is_rebuilt(root: Path, source: Path) -> None:
    """A change of equal size and time is found too: files of the last run are not trusted by their time alone."""
    before, path = tree(root), root / "two.bin"
    harms: dict[Callable[[], object], str] = {
        path.unlink: "two.bin is gone",
        lambda: path.write_bytes(before["two.bin"][::-1]): "two.bin was changed after it was made",
    }
    for harm, why in harms.items():
        harm()
        assert {row.stage: row.why for row in stage_statuses(fake_stages(source), root)}["two"] == why
        assert finish_stages(fake_stages(source), root).finished == ("two",)
        assert tree(root) == before


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[" * 100_000, "{}", '{"kind": "corp-deploy/stamp", "version": 2, "inputs": {}, "outputs": {}}'),
        '{"kind": "corp-deploy/stamp", "version": 1, "inputs": {}, "outputs": {"folder/three.bin": 3}}',
    ],
)
def test_damaged_stamp_reruns_the_stage(root: Path, source: Path, text: str) -> None:
    (root / STATE / "three.json").write_text(text)
    assert finish_stages(fake_stages(source), root).finished == ("three",)


def test_damaged_digests_are_recomputed(root: Path, source: Path) -> None:
    (root / STATE / "digests.json").write_text('{"kind": "corp-deploy/digests", "version": 1, "files": {"a": 1}}')
    assert finish_stages(fake_stages(source), root).finished == ()


def test_stamp_round_trips(root: Path) -> None:
    """The format is that of all earlier releases."""
    stamp = json.loads((root / STATE / "two.json").read_text())
    assert list(stamp) == ["kind", "version", "inputs", "outputs"]
    assert (stamp["kind"], stamp["version"], stamp["inputs"]["number"]) == ("corp-deploy/stamp", 1, "1")
    assert stamp["outputs"] == {"two.bin": sha256_of_file(root / "two.bin")}


def test_files_of_removed_stages_are_deleted_and_user_files_kept(root: Path, source: Path) -> None:
    (root / "mine.txt").write_text("mine")
    (root / "manifest.txt").write_text("edited")
    finish_stages(fake_stages(source)[:2], root)
    assert not (root / "folder/three.bin").exists()
    assert (root / "manifest.txt").exists(), "an edited file is kept"
    assert (root / "mine.txt").exists()
    assert (root / "folder/one.bin").exists()


def test_missing_tool_stops_only_dependent_stages(tmp_path: Path, source: Path) -> None:
    stages = fake_stages(source)
    stages[1] = replace(stages[1], missing=lambda: "no GPU")
    outcome = finish_stages(stages, tmp_path / "out")
    assert outcome.finished == ("one", "three")
    assert outcome.blocked == {"two": "no GPU", "last": "waits for two"}
    assert states(stages, tmp_path / "out")["last"] == "blocked"
    outcome = finish_stages(fake_stages(source), tmp_path / "out")
    assert outcome.finished == ("two", "last")
    assert finish_stages(stages, tmp_path / "out").blocked == {}, "a finished stage needs no tool"


@pytest.mark.slow("process")
def test_run_killed_at_any_file_operation_resumes_to_equal_bytes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.killing", "fake", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 60, done.stdout
    assert [line for line in lines if not line.endswith("same")] == []


def test_concurrent_runs_are_refused(tmp_path: Path) -> None:
    message = r"another release \(process \d+ since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\) works in this directory"
    with locked_release(tmp_path), pytest.raises(BadInput, match=message):  # noqa: SIM117
        with locked_release(tmp_path):
            pass
    with locked_release(tmp_path):
        pass


def test_forced_stage_reruns_dependents_only_if_its_output_changes(root: Path, source: Path) -> None:
    stages = [replace(each, again=each.name == "two") for each in fake_stages(source)]
    assert {row.stage: row.why for row in stage_statuses(stages, root)}["two"] == AGAIN
    assert finish_stages(stages, root).finished == ("two",)
    assert finish_stages(fake_stages(source), root).finished == ()


def test_measurements_rerun_on_another_machine_if_possible(tmp_path: Path, source: Path) -> None:
    def on(machine: str, missing: str | None = None) -> list[Stage]:
        one, two, *others = fake_stages(source)
        return [one, replace(two, machine=lambda: {"driver": machine}, missing=lambda: missing), *others]

    root = tmp_path / "out"
    assert "two" in finish_stages(on("610.1"), root).finished
    assert finish_stages(on("610.1"), root).finished == ()
    assert set(states(on("640.2", missing="no GPU"), root).values()) == {"cached"}
    assert {row.stage: row.why for row in stage_statuses(on("640.2"), root)}["two"] == "changed: machine"
    assert finish_stages(on("640.2"), root).finished == ("two",)


def test_measurement_machine_is_identified_by_cpu_gpu_driver_and_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def watched() -> Iterator[tuple[None, dict[str, str]]]:
        yield None, {"gpu": "H200", "driver": "610.1"}

    monkeypatch.setattr(targets, "watching", watched)
    monkeypatch.setattr("perf.timing.watch.package_version", lambda package: f"{package} 1")
    on_cpu, on_gpu = (machine_facts(release_target(name, TargetTable(), ExportTable(), (1,), ()))
                      for name in ("onnxruntime-cpu", "tensorrt"))  # fmt: skip
    assert on_cpu.keys() == {"machine", "cpu", "cpu_count"}
    assert on_gpu == on_cpu | {"gpu": "H200", "driver": "610.1", "tensorrt": "tensorrt 1"}


@pytest.mark.parametrize(
    "words", [("ship", "absent", "--images", "absent.npy"), ("release", "r.toml"), ("release", "r.toml", "--plan-only")]
)
def test_second_release_is_refused_before_loading_its_model(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("w.safetensors", "x.npy"):
        (tmp_path / name).touch()
    invoked("release", "r.toml", "--init", "vit_tiny_patch16_224", "--weights", "w.safetensors", "--images", "x.npy")
    with locked_release(tmp_path / "out"):
        refuses(f"out: another release (process {os.getpid()} since 20", *words, "-o", "out")


def test_folders_made_for_the_lock_are_removed_if_empty(tmp_path: Path) -> None:
    root = tmp_path / "new" / "out"
    with locked_release(root):
        pass
    assert list(tmp_path.iterdir()) == []
    with locked_release(root):
        (root / "result").touch()
    assert [path.name for path in root.iterdir()] == ["result"]


FULL = [
    (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
    (OSError(errno.EFBIG, "File too large"), errno.EFBIG),
    (RuntimeError("I/O error: No space left on device (os error 28)"), errno.ENOSPC),
]


@pytest.mark.parametrize(("error", "number"), FULL)
def test_full_disk_gives_one_error_and_no_partial_file(root: Path, source: Path, error: Exception, number: int) -> None:
    def full(place: StageDirs) -> None:
        (place.into / "two.bin").write_bytes(b"half")
        raise error

    before = tree(root)
    stages = fake_stages(source)
    stages[1] = replace(stages[1], run=full, settings={"number": 9})
    with pytest.raises(OSError, match="stage two") as caught:
        finish_stages(stages, root)
    assert caught.value.errno == number
    assert tree(root) == before
    assert not (root / STATE / "work").exists()


def test_missing_source_is_named(tmp_path: Path) -> None:
    rejects(
        r"nowhere\.txt: no such file or folder", finish_stages, fake_stages(tmp_path / "nowhere.txt"), tmp_path / "out"
    )


def test_folder_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"1")
    stages = fake_stages(folder)
    finish_stages(stages, tmp_path / "out")
    (folder / "a.png").rename(folder / "b.png")
    assert finish_stages(stages, tmp_path / "out").finished == ("one",)
    (tmp_path / "x-00.tar").write_bytes(b"1")
    assert finish_stages(fake_stages(tmp_path / "x-{00..00}.tar"), tmp_path / "out").finished == ("one",)


# Timing records stand beside the stamps, are left out of digests, and are kept until their stage runs again.

MIB = 2**20


class Peak:
    """A memory gauge with a constant peak."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 3 * MIB


def watch_of(*times: float) -> Callable[[str], Stopwatch]:
    each = iter(times)
    return lambda device: Stopwatch(host=Peak(), clock=lambda: next(each))


def stage(name: str, text: str, *parts: str) -> Stage:
    def written(dirs: StageDirs) -> None:
        for part in parts:
            with measure_effort(dirs.watch, part):
                pass
        write_text(dirs.into / f"{name}.txt", text)

    return Stage(name=name, outputs=(f"{name}.txt",), run=written, settings={"text": text})


def took(seconds: float) -> Effort:
    return Effort(seconds=seconds, peak_bytes=3 * MIB, device_peak_bytes=None)


def known(step: Step, **parts: float) -> EffortRecord:
    """Make the record of a step; `rest` is the time of reading and writing."""
    names = {"rest": "read and write"}
    efforts = {names.get(name, name): took(seconds) for name, seconds in parts.items()}
    return EffortRecord(step=step, machine=cpu_name(), versions=versions(), parts=efforts)


def test_stage_keeps_its_step_records_until_it_reruns(tmp_path: Path) -> None:
    # Whole stages take 2.5, 7 and 2 s; of the last two, select takes 4 and 0.5 s, recover 2 and 0.25 s.
    times = watch_of(1.0, 3.5, *(10.0, 10.5, 14.5, 14.5, 16.5, 17.0), *(20.0, 21.0, 21.5, 21.5, 21.75, 22.0))
    out, moments = tmp_path / "out", timed(stage("moments", "a"), watch_of=times)
    one, two = (timed(stage("reduce", text, "select", "recover"), watch_of=times) for text in ("b", "c"))
    assert finish_stages([moments, one], out).finished == ("moments", "reduce")
    assert "seconds" not in (out / STATE / "moments.json").read_text()
    assert finish_stages([moments, one], out).finished == ()
    first = {
        ("calibrate", ""): known("calibrate", rest=2.5),
        ("reduce", ""): known("reduce", select=4.0, recover=2.0, rest=1.0),
    }
    assert efforts_in(out) == first
    assert finish_stages([moments, two], out).finished == ("reduce",)
    again = {("reduce", ""): known("reduce", select=0.5, recover=0.25, rest=1.25)}
    assert efforts_of(out, ["recipe", "moments", "reduce"]) == first | again


def test_failed_stage_keeps_the_older_timing_record(tmp_path: Path) -> None:
    def failing(dirs: StageDirs) -> None:
        raise BadInput("no")

    finish_stages([timed(stage("reduce", "a"), watch_of=watch_of(0.0, 1.0))], tmp_path / "out")
    broken = timed(replace(stage("reduce", "b"), run=failing), watch_of=watch_of(0.0))
    rejects("no", finish_stages, [broken], tmp_path / "out")
    assert efforts_in(tmp_path / "out") == {("reduce", ""): known("reduce", rest=1.0)}
    untimed = stage("gate", "a")
    assert timed(untimed) is untimed


def test_resumed_stage_reports_that_earlier_time_is_not_counted(tmp_path: Path) -> None:
    def interrupted(dirs: StageDirs) -> None:
        write_text(dirs.unfinished, "state")
        raise KeyboardInterrupt

    whole = stage("reduce", "a", "polish")
    with pytest.raises(KeyboardInterrupt):
        finish_stages([timed(replace(whole, run=interrupted), watch_of=watch_of(0.0))], tmp_path / "out")
    finish_stages([timed(whole, watch_of=watch_of(0.0, 0.0, 5.0, 6.0))], tmp_path / "out")
    (line, _) = effort_lines(efforts_in(tmp_path / "out"))
    assert (line.step, line.seconds) == ("polish, continued", 5.0)


def test_timing_rows_name_repeated_steps() -> None:
    built = {"build": Effort(seconds=60.0, peak_bytes=None, device_peak_bytes=9 * MIB)}
    efforts: Efforts = {
        ("calibrate", ""): known("calibrate", calibrate=2.5, rest=0.5),
        ("reduce", ""): None,
        ("export", "dense"): known("export", export=1.0, rest=0.25),
        ("build", "tensorrt"): EffortRecord(step="build", machine="a|b", versions={}, gpu="H200", parts=built),
    }
    assert [(line.step, line.seconds, line.machine) for line in effort_lines(efforts)] == [
        ("calibrate", 2.5, cpu_name()), ("select", None, ""), ("recover", None, ""),
        ("export dense", 1.0, cpu_name()), ("build tensorrt", 60.0, "a|b"), ("read and write", 0.75, ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "corp-deploy/effort", "version": 1, "step": "reduce"}', "machine"),
        ('{"kind": "corp-deploy/effort", "version": 2}', "version 2"),
        ('{"kind": "bench", "version": 1}', "expected a corp-deploy/effort record, got 'bench'"),
        ("{", "not JSON"),
        (
            '{"kind": "corp-deploy/effort", "version": 1, "step": "reduce", "machine": "", "versions": {}, "parts": '
            '{"select": {"seconds": -1.0, "peak_bytes": null, "device_peak_bytes": null}}}',
            "parts.*seconds.*delete it, it holds nothing but what a step took",
        ),
    ],
)
def test_damaged_timing_record_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / STATE / "reduce.effort"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    rejects(r"reduce\.effort.*" + reason, efforts_of, tmp_path, ["reduce"])


def test_folder_digests_ignore_timing_records(tmp_path: Path) -> None:
    """A reduced model whose reduction took another time is the same model."""
    for name in ("model.safetensors", "effort.json", "model.onnx.effort.json", "effort.jsonl"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in files_of(tmp_path)] == ["effort.jsonl", "model.safetensors"]
