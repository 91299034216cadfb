"""What stages took: beside the stamps, not among what is digested, and kept until a stage is run again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corp_deploy.machine import versions
from corp_deploy.release.digests import files_of
from corp_deploy.release.incremental import STATE, Stage, StageDirs, locked, run
from corp_deploy.release.stage_effort import efforts_in, efforts_of, timed
from corp_deploy.store.manifest import EffortRecord, Step, rows_of_efforts, write_effort
from ground.effort import Effort, Stopwatch, measured
from ground.errors import BadInput
from ground.files import write_text
from perf.timing.watch import cpu_name

MIB = 2**20


class Peak:
    """A gauge that always tells the same."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 3 * MIB


def watch_of(*times: float) -> Callable[[str], Stopwatch]:
    each = iter(times)
    return lambda device: Stopwatch(host=Peak(), clock=lambda: next(each))


def stage(name: str, text: str, *parts: str) -> Stage:
    def written(dirs: StageDirs) -> None:
        for part in parts:
            with measured(dirs.watch, part):
                pass
        write_text(dirs.into / f"{name}.txt", text)

    return Stage(name=name, outputs=(f"{name}.txt",), run=written, settings={"text": text})


def carried_out(root: Path, *stages: Stage) -> tuple[str, ...]:
    root.mkdir(exist_ok=True)
    with locked(root):
        return run(stages, root, starts=lambda stage, why: None).finished


def took(seconds: float) -> Effort:
    return Effort(seconds=seconds, peak_bytes=3 * MIB, device_peak_bytes=None)


def known(step: Step, **parts: float) -> EffortRecord:
    """`rest` is what was read and written."""
    names = {"rest": "read and write"}
    efforts = {names.get(name, name): took(seconds) for name, seconds in parts.items()}
    return EffortRecord(step=step, machine=cpu_name(), versions=versions(), parts=efforts)


def test_a_stage_holds_its_parts_and_keeps_them_until_it_is_run_again(tmp_path: Path) -> None:
    # Whole stages take 2.5, 7 and 2 s, of which select takes 4 and 0.5, recover 2 and 0.25.
    times = watch_of(1.0, 3.5, *(10.0, 10.5, 14.5, 14.5, 16.5, 17.0), *(20.0, 21.0, 21.5, 21.5, 21.75, 22.0))
    one, two = (
        [
            timed(stage("moments", "a"), watch_of=times),
            timed(stage("reduce", text, "select", "recover"), watch_of=times),
        ]
        for text in ("b", "c")
    )
    assert carried_out(tmp_path / "out", *one) == ("moments", "reduce")
    stamp = (tmp_path / "out" / STATE / "moments.json").read_text()
    assert "seconds" not in stamp
    assert carried_out(tmp_path / "out", *one) == ()
    first = efforts_in(tmp_path / "out")
    assert first == {
        ("calibrate", ""): known("calibrate", rest=2.5),
        ("reduce", ""): known("reduce", select=4.0, recover=2.0, rest=1.0),
    }
    assert carried_out(tmp_path / "out", *two) == ("reduce",)
    assert efforts_of(tmp_path / "out", ["recipe", "moments", "reduce"]) == {
        **first,
        ("reduce", ""): known("reduce", select=0.5, recover=0.25, rest=1.25),
    }


def test_a_stage_that_fails_keeps_the_older_record_and_others_are_not_timed(tmp_path: Path) -> None:
    def failing(dirs: StageDirs) -> None:
        raise BadInput("no")

    carried_out(tmp_path / "out", timed(stage("reduce", "a"), watch_of=watch_of(0.0, 1.0)))
    broken = timed(replace(stage("reduce", "b"), run=failing), watch_of=watch_of(0.0))
    with pytest.raises(BadInput, match="no"):
        carried_out(tmp_path / "out", broken)
    assert efforts_in(tmp_path / "out") == {("reduce", ""): known("reduce", rest=1.0)}
    untimed = stage("gate", "a")
    assert timed(untimed) is untimed


def test_a_stage_that_goes_on_says_that_an_earlier_attempt_is_not_counted(tmp_path: Path) -> None:
    def interrupted(dirs: StageDirs) -> None:
        write_text(dirs.unfinished, "state")
        raise KeyboardInterrupt

    whole = stage("reduce", "a", "polish")
    with pytest.raises(KeyboardInterrupt):
        carried_out(tmp_path / "out", timed(replace(whole, run=interrupted), watch_of=watch_of(0.0)))
    carried_out(tmp_path / "out", timed(whole, watch_of=watch_of(0.0, 0.0, 5.0, 6.0)))
    (row, _) = rows_of_efforts(efforts_in(tmp_path / "out"))
    assert (row["step"], row["seconds"]) == ("polish, continued", 5.0)


def test_rows_name_what_a_step_was_about_where_there_are_several(tmp_path: Path) -> None:
    gpu = EffortRecord(
        step="build",
        machine="a|b",
        versions={},
        gpu="H200",
        parts={"build": Effort(seconds=60.0, peak_bytes=None, device_peak_bytes=9 * MIB)},
    )
    rows = rows_of_efforts(
        {
            ("calibrate", ""): known("calibrate", calibrate=2.5, rest=0.5),
            ("reduce", ""): None,
            ("export", "dense"): known("export", export=1.0, rest=0.25),
            ("build", "tensorrt"): gpu,
        }
    )
    told = [(row["step"], row.get("seconds"), row.get("machine")) for row in rows]
    assert told == [
        ("calibrate", 2.5, cpu_name()),
        ("select", None, None),
        ("recover", None, None),
        ("export dense", 1.0, cpu_name()),
        ("build tensorrt", 60.0, "a|b"),
        ("read and write", 0.75, None),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "corp-deploy/effort", "version": 1, "step": "reduce"}', "machine"),
        ('{"kind": "corp-deploy/effort", "version": 2}', "version 2"),
        ('{"kind": "bench", "version": 1}', "expected a corp-deploy/effort record, got 'bench'"),
        ("{", "not JSON"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / STATE / "reduce.effort"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(BadInput, match=r"reduce\.effort.*" + reason):
        efforts_of(tmp_path, ["reduce"])


@pytest.mark.parametrize("seconds", [-1.0, "1", None])
def test_impossible_figures_are_refused(tmp_path: Path, seconds: object) -> None:
    path = tmp_path / STATE / "reduce.effort"
    write_effort(path, known("reduce", select=1.0))
    record = json.loads(path.read_text())
    record["parts"]["select"]["seconds"] = seconds
    path.write_text(json.dumps(record))
    with pytest.raises(BadInput, match=r"parts.*seconds.*delete it, it holds nothing but what a step took"):
        efforts_of(tmp_path, ["reduce"])


def test_folders_are_digested_without_such_records(tmp_path: Path) -> None:
    """A reduced model in a recipe is the same model when it took another time."""
    for name in ("model.safetensors", "effort.json", "model.onnx.effort.json", "effort.jsonl"):
        (tmp_path / name).write_text(name)
    assert [path.name for path in files_of(tmp_path)] == ["effort.jsonl", "model.safetensors"]
