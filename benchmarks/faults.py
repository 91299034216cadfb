"""What is left where a command is disturbed: its files fail one after the other, the disk is full, it gets signals, it
runs twice at once, memory runs out, a worker dies, the clock leaps.

python -m benchmarks.faults --home DIR            benchmarks/results/faults.json; an hour of one core
python -m benchmarks.faults --home DIR --quick    some points of two commands, told as JSON
python -m benchmarks.faults_page                  docs/faults.md of the record
"""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from tests import faults
from tests.faults import Fault, Row, Scenario, row

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "faults.json"
MARK = "CORP_DEPLOY_FAULTS"
FAULTS = (
    Fault(name="the disk is full, once"),
    Fault(name="the disk is full, from then on", ever=True),
    Fault(name="the disk fails, once", number=errno.EIO),
    Fault(name="read-only, from then on", number=errno.EROFS, ever=True),
    Fault(name="SIGINT", signal=signal.SIGINT),
    Fault(name="SIGTERM", signal=signal.SIGTERM),
    Fault(name="SIGKILL", signal=signal.SIGKILL),
)
RECIPE = """
[model]
model = "dense"
[calibration]
images = "calibration.npy"
hold_out = 4
batch_size = 4
[held_out]
images = "held-out.npz"
labels = "held-out.npz"
[reduce]
mlp = 0.3
attn = 0.5
align_mlp = 8
align_head = 8
[export]
precisions = ["fp32"]
[parity]
batches = [1, 3]
[bench]
batches = [2]
time_limit_s = 0.1
half_width = 0.9
block_ms = 1
min_rounds = 6
threads = 1
[samples]
count = 3
[gate]
fail_if = ["params >= dense"]
[package]
name = "tiny"
"""
TIMED = ("bench.json", "gate.json", "report.html", "report.md", "report.xml", "MODEL_CARD.md", "manifest.json",
         "SHA256SUMS")  # fmt: skip


def run(*words: object) -> None:
    """A command in this process, which so imports what those to come need."""
    from click.testing import CliRunner

    from corp_deploy.cli import main

    done = CliRunner().invoke(main, [str(word) for word in words])
    if done.exit_code:
        raise click.ClickException(f"{words}: exit {done.exit_code}: {done.output}")


def prepare(home: Path) -> None:
    """A tiny model, its images, its moments."""
    import numpy as np
    import torch

    from corp_deploy.store.checkpoint import save
    from tests import tiny

    torch.set_num_threads(1)
    (home / "empty").mkdir(parents=True)
    save(tiny.checkpoint(), home / "dense")
    np.save(home / "calibration.npy", tiny.images(12))
    np.savez(home / "held-out.npz", images=tiny.images(9, seed=1), labels=np.arange(9) % 7)
    (home / "recipe.toml").write_text(RECIPE)
    run(*calibrate(home), "-o", home / "moments.safetensors")


def calibrate(home: Path) -> tuple[object, ...]:
    return "calibrate", "--model", home / "dense", "--images", home / "calibration.npy", "--batch-size", 4, "--quiet"


def reduce(home: Path) -> tuple[object, ...]:
    words = ("reduce", "--model", home / "dense", "--moments", home / "moments.safetensors", "--align", "mlp=8,head=8")
    return *words, "--attn", 0.5, "--quiet"


def scenarios_of_calibrate(home: Path) -> Iterator[Scenario]:
    place, name = home / "place", "moments.safetensors"
    run(*calibrate(home), "--samples", 8, "-o", home / "older moments" / name)
    words = (*calibrate(home), "--hold-out", 4, "--checkpoint-every", 4, "-o", place / name)
    for start, before in (("nothing", "empty"), ("an older one", "older moments")):
        yield Scenario(command="calibrate", start=start, words=words, place=place, before=home / before, apart=True)


def scenarios_of_reduce(home: Path) -> Iterator[Scenario]:
    place = home / "place"
    run(*reduce(home), "--mlp", 0.25, "-o", home / "older model" / "out")
    words = (*reduce(home), "--mlp", 0.5, "-o", place / "out")
    for start, before in (("nothing", "empty"), ("an older one", "older model")):
        yield Scenario(command="reduce", start=start, words=words, place=place, before=home / before)


def scenarios_of_package(home: Path) -> Iterator[Scenario]:
    """Of the graph of the model in `older model`."""
    place, graphs = home / "place", home / "graphs"
    if not graphs.is_dir():
        run("export", "--model", home / "older model" / "out", "-o", graphs / "reduced" / "model.onnx", "--quiet")
    words = ("package", graphs, "--name", "tiny", "--quiet", "-o")
    run(*words, home / "older repository" / "repository")
    for start, before, number in (("nothing", "empty", 1), ("an older version", "older repository", 2)):
        yield Scenario(
            command="package", start=start, words=(*words, place / "repository", "--model-version", number),
            place=place, before=home / before, is_there=2,
        )  # fmt: skip


def scenarios_of_release(home: Path) -> Iterator[Scenario]:
    """Stage by stage, each from where those before it stand."""
    run("release", home / "recipe.toml", "-o", home / "released", "--quiet")
    from corp_deploy.release.baseline import Baseline
    from corp_deploy.release.pipeline import stages_of
    from corp_deploy.release.recipe_file import load_recipe

    place = home / "place"
    whole = ("release", home / "recipe.toml", "-o", place / "out", "--quiet")
    shutil.rmtree(place, ignore_errors=True)
    (place / "out").mkdir(parents=True)
    for stage in stages_of(load_recipe(home / "recipe.toml"), place / "out", Baseline()):
        before = home / "stages" / stage.name
        shutil.copytree(place, before)
        words = (*whole, "--only", stage.name)
        yield Scenario(
            command=f"release: {stage.name}", start="the stages before it", words=words, place=place, before=before,
            differs=[f"out/{name}" for name in TIMED], apart=True,
        )  # fmt: skip
        shutil.rmtree(place)
        shutil.copytree(before, place)
        run(*words)


def scenarios_of_others(home: Path) -> Iterator[Scenario]:
    """Commands that write one file, over what stands there of them."""
    place, release = home / "place", home / "released"
    subjects = (release / "dense" / "model.onnx", release / "reduced" / "model.onnx")
    images = ("--images", release / "samples" / "images.npy")
    moments = (release / "moments.safetensors", home / "moments.safetensors")
    verify = ("verify", release / "dense", release / "reduced", subjects[1], *images, "--min-agreement", 0, "--quiet")
    commands: dict[str, tuple[object, ...]] = {
        "export": ("export", "--model", release / "reduced", "--quiet", "-o", "model.onnx"),
        "verify": (*verify, "-o", "parity.json"),
        "bench": ("bench", *subjects, "--batch", 2, "--time-limit", 0.1, "--quiet", "-o", "bench.json"),
        "report": ("report", release, "--quiet", "-o", "report.html"),
        "moments": ("calibrate", *calibrate(home)[1:], "--samples", 8, "-o", moments[1].name),
    }
    for command, (*words, name) in commands.items():
        before = home / f"before {command}"
        run(*words, before / str(name))
        yield Scenario(
            command=str(words[0]), start="an older one", words=(*words, place / str(name)), place=place, before=before,
            apart=True, differs=("bench.json", "parity.json", "parity.npz"),
        )  # fmt: skip


def drawn_times(seed: int, count: int, longest_s: float) -> list[float]:
    draw = random.Random(seed)
    return [round(draw.uniform(0.0, longest_s), 3) for _ in range(count)]


def rows_of(home: Path, part: str) -> Iterator[Row]:
    """Of one part of the table."""
    prepare(home)
    for scenario in PARTS[part](home):
        for fault in FAULTS:
            points = None
            if part == "release" and fault is not FAULTS[0]:
                points = faults.some(faults.operations_of(scenario), 8)
            yield row(scenario, fault, points)
        if part == "others":
            for fault in FAULTS[4:]:
                yield row(scenario, replace(fault, name=f"{fault.name}, at any time"), times=drawn_times(0, 6, 0.5))


PARTS: Mapping[str, Callable[[Path], Iterator[Scenario]]] = {
    "calibrate": scenarios_of_calibrate,
    "reduce": scenarios_of_reduce,
    "package": scenarios_of_package,
    "release": scenarios_of_release,
    "others": scenarios_of_others,
}


def quick_rows(home: Path) -> list[Row]:
    """Some points of two commands."""
    prepare(home)
    fresh, older = scenarios_of_reduce(home)
    rows = [row(fresh, FAULTS[0], (14,)), row(older, FAULTS[1], (24,)), row(older, FAULTS[5], (4, 24))]
    rows.append(row(older, FAULTS[6], (9, 25)))
    _, moments = scenarios_of_calibrate(home)
    return [*rows, row(moments, FAULTS[2], (7,)), row(moments, FAULTS[6], (18,))]


def behind_library(home: Path) -> None:
    """Start this program again with the library before the C library's, where it isn't."""
    if MARK not in os.environ:
        shim = faults.library(home)
        environment = {**os.environ, "LD_PRELOAD": str(shim), MARK: str(home), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "benchmarks.faults", *sys.argv[1:]]
        sys.exit(subprocess.run(words, env=environment, check=False).returncode)


@click.command()
@click.option("--quick", is_flag=True, help="Some points alone, told as JSON.")
@click.option(
    "--only", type=click.Choice([*PARTS, "happenings"]), multiple=True, help="Parts; others stay as recorded."
)
@click.option("--home", type=click.Path(path_type=Path), required=True, help="An empty directory to work in.")
def main(quick: bool, only: tuple[str, ...], home: Path) -> None:
    """Disturb commands and record what is left."""
    home.mkdir(parents=True, exist_ok=True)
    behind_library(home)
    if quick:
        click.echo(json.dumps([asdict(each) for each in quick_rows(home / "quick")]))
        return
    for part in only or (*PARTS, "happenings"):
        if part == "happenings":
            from benchmarks.faults_happenings import happenings

            found = [asdict(each) for each in happenings(home / part)]
        else:
            found = [asdict(each) for each in rows_of(home / part, part)]
        record(part, found)


def record(part: str, found: list[dict[str, Any]]) -> None:
    """Into the record, in place of that part's older rows."""
    with RECORD.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps({**held, part: found}, indent=1, sort_keys=True) + "\n")
    RECORD.with_suffix(".lock").unlink(missing_ok=True)
    wrong = [f"{each.get('command')}: {what}" for each in found for what in each["wrong"]]
    click.echo(f"{part}: {len(found)} rows, {len(wrong)} wrong\n" + "\n".join(wrong[:20]), err=True)


if __name__ == "__main__":
    main()
