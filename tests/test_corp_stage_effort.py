"""What stages took: beside the stamps, not among what is digested, and kept until a stage is run again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from corp_deploy.release.incremental import STATE, Stage, StageDirs, locked, run
from corp_deploy.release.stage_effort import StageEffort, effort_lines, efforts_of, timed
from ground.effort import Effort, Stopwatch
from ground.errors import BadInput
from ground.files import write_text

MIB = 2**20


class Peak:
    """A gauge that always tells the same."""

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 3 * MIB


def watch_of(*times: float) -> Callable[[], Stopwatch]:
    each = iter(times)
    return lambda: Stopwatch(host=Peak(), clock=lambda: next(each))


def stage(name: str, text: str) -> Stage:
    return Stage(
        name=name,
        outputs=(f"{name}.txt",),
        run=lambda dirs: write_text(dirs.into / f"{name}.txt", text),
        settings={"text": text},
    )


def carried_out(root: Path, *stages: Stage) -> tuple[str, ...]:
    root.mkdir(exist_ok=True)
    with locked(root):
        return run(stages, root, starts=lambda stage, why: None).finished


def test_a_stage_that_is_not_run_again_keeps_its_older_record(tmp_path: Path) -> None:
    times = watch_of(1.0, 3.5, 10.0, 14.0, 20.0, 21.0)
    one, two = (
        [timed(stage(name, text), times, machine=lambda: "box") for name, text in (("moments", "a"), ("reduce", text))]
        for text in ("b", "c")
    )
    assert carried_out(tmp_path / "out", *one) == ("moments", "reduce")
    stamp = (tmp_path / "out" / STATE / "moments.json").read_text()
    assert "seconds" not in stamp
    assert carried_out(tmp_path / "out", *one) == ()
    assert carried_out(tmp_path / "out", *two) == ("reduce",)
    kept = efforts_of(tmp_path / "out", ["recipe", "moments", "reduce"])
    assert kept == {
        "moments": known("moments", 2.5),
        "reduce": known("reduce", 1.0),
    }


def known(name: str, seconds: float, machine: str = "box") -> StageEffort:
    effort = Effort(seconds=seconds, peak_bytes=3 * MIB, device_peak_bytes=None)
    return StageEffort(stage=name, machine=machine, effort=effort)


def test_a_stage_that_fails_keeps_the_older_record_and_others_are_not_timed(tmp_path: Path) -> None:
    def failing(dirs: StageDirs) -> None:
        raise BadInput("no")

    carried_out(tmp_path / "out", timed(stage("reduce", "a"), watch_of(0.0, 1.0), machine=lambda: "box"))
    broken = timed(replace(stage("reduce", "b"), run=failing), watch_of(0.0))
    with pytest.raises(BadInput, match="no"):
        carried_out(tmp_path / "out", broken)
    assert efforts_of(tmp_path / "out", ["reduce"]) == {"reduce": known("reduce", 1.0)}
    untimed = stage("gate", "a")
    assert timed(untimed, watch_of()) is untimed


def test_the_table_adds_up_seconds_and_takes_the_highest_peak() -> None:
    gpu = StageEffort(
        stage="engine.tensorrt",
        machine="a|b",
        effort=Effort(seconds=60.0, peak_bytes=None, device_peak_bytes=9 * MIB),
    )
    lines = list(effort_lines({"moments": known("moments", 2.5), "engine.tensorrt": gpu}))
    assert lines[2:5] == [
        "| calibrate | 2.5 | 3 | - | box |",
        r"| build tensorrt | 60.0 | - | 9 | a\|b |",
        "| total | 62.5 | 3 | 9 | |",
    ]


def test_no_total_stands_where_a_step_was_not_recorded() -> None:
    lines = list(effort_lines({"moments": known("moments", 2.5), "reduce": None}))
    assert "| reduce | not recorded | - | - | - |" in lines
    assert not [line for line in lines if line.startswith("| total")]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / STATE / "reduce.effort"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"kind": "corp-deploy/effort", "version": 1, "stage": "reduce"}))
    with pytest.raises(BadInput, match=r"reduce\.effort"):
        efforts_of(tmp_path, ["reduce"])
