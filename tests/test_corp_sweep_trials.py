"""Sweeps: rows equal to reduce and bench, resumed and cached trials, several processes, fronts and effects."""

import csv
import json
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from calib.inputs import as_tuple, tensors_by_name
from corp_deploy.cli import main
from corp_deploy.families.traced_model import tracing
from corp_deploy.planning import probe, sweep_speed
from corp_deploy.planning import sweep as sweeping
from corp_deploy.planning.judging import top_k_accuracy
from corp_deploy.planning.probe import effects_of_new_tensors
from corp_deploy.planning.sweep_points import SpeedAtBatch, SweepPoint, fastest_that_agrees, find_front, mark_fronts
from corp_deploy.planning.sweep_speed import SweepBench
from corp_deploy.store.checkpoint import load_checkpoint, save
from ground.files import locked
from perf.record.runs import load_bench
from perf.stats.stats import Interval
from perf.stats.summary import summarise
from tests import tiny
from tests.command import invoked, refuses
from tests.histories import bench_of_release

FOLDER = TemporaryDirectory()
HOME = Path(FOLDER.name)
MERGED = ("--calibration-images", "x.npy")
QUICK = ("--time-limit", 0.5, "--half-width", 0.5)


@cache
def home() -> Path:
    tiny.written(HOME, 40, to="calibration.npy", depth=1)
    np.save(HOME / "images.npy", tiny.images(24, seed=1))
    np.save(HOME / "labels.npy", np.arange(24) % 7)
    for count in (12, 40):
        words = ("--images", HOME / "calibration.npy", "--samples", count, "-o", HOME / f"m{count}.safetensors", "-q")
        invoked("calibrate", "--model", HOME / "dense", *words)
    return HOME


def model_words(moments: str = "m40.safetensors") -> list[object]:
    files = ",".join(str(home() / name) for name in moments.split(","))
    return ["--model", home() / "dense", "--moments", files, "--images", home() / "images.npy"]


def sweep_words(output: Path, *words: object, moments: str = "m40.safetensors") -> list[object]:
    return ["sweep", *model_words(moments), "--align", "mlp=8,head=8", *words, "-o", output]


def trials_of(output: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((output / "sweep.json").read_text())["trials"]
    return trials


def run_sweep(output: Path, *words: object, moments: str = "m40.safetensors") -> list[dict[str, Any]]:
    invoked(*sweep_words(output, *words, moments=moments))
    return trials_of(output)


def without_times(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("effort", "speeds", "fronts", "size_bytes", "engine")
    return [{name: value for name, value in trial.items() if name not in timed} for trial in trials]


@pytest.mark.slow("graph", "measurement")
def test_sweep_row_equals_reduce_and_bench(tmp_path: Path) -> None:
    words = ("--sparsity", 0.5, "--preset", "corp-v1", "--macs", 0.8, "--bench", "onnxruntime", "--batch", "1,3")
    trials = run_sweep(tmp_path / "s", *words, *QUICK, "--labels", home() / "labels.npy", "--keep-models")
    images = torch.from_numpy(np.load(home() / "images.npy"))
    asked = (["--preset", "corp-v1", "--mlp", 0.5, "--attn", 0.5], ["--macs", 0.8, "--images", home() / "images.npy"])
    dense = load_checkpoint(home() / "dense").model(images).double().detach()
    for number, (trial, options) in enumerate(zip(trials, asked, strict=True)):
        reduced = ["reduce", "--model", home() / "dense", "--moments", home() / "m40.safetensors", *options]
        invoked(*reduced, "--align", "mlp=8,head=8", "-o", tmp_path / f"r{number}")
        model = load_checkpoint(tmp_path / f"r{number}").model
        logits = model(images).double().detach()
        error = torch.linalg.norm(logits - dense) / torch.linalg.norm(dense)
        assert trial["relative_error"] == pytest.approx(float(error), rel=0.2)  # a sweep averages errors by image
        assert trial["agreement"] == float((logits.argmax(1) == dense.argmax(1)).double().mean())
        right = (logits.argmax(1).numpy() == np.arange(24) % 7).mean()
        five = [label in row.argsort()[-5:] for row, label in zip(logits.numpy(), np.arange(24) % 7, strict=True)]
        assert (trial["accuracy"], trial["top5"]) == (right, np.mean(five))
        kept = next(path for path in (tmp_path / "s/trials").iterdir() if path.name.startswith(trial["preset"]))
        weights = load_checkpoint(kept / "reduced").model.state_dict()
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, weights[name], rtol=0.0, atol=0.0)
        summary = summarise(load_bench(kept / "bench.json"))
        for speed, row in zip(trial["speeds"], summary.rows, strict=True):
            side = row.sides["reduced"]
            assert side.p50_ms is not None
            assert (speed["batch"], speed["p50_ms"]["value"]) == (row.batch, side.p50_ms.value)
            assert (speed["speedup"] or {}).get("value") == (row.speedup and row.speedup.value)
    table = list(csv.DictReader((tmp_path / "s/sweep.csv").read_text().splitlines()))
    assert [float(row["p50_ms@b3"]) for row in table] == [trial["speeds"][1]["p50_ms"]["value"] for trial in trials]
    page = (tmp_path / "s/sweep.html").read_text()
    assert "Error against latency, batch 3" in page
    assert "Share that disagrees against MACs" in page
    assert not any(mark in page for mark in ("<script", "src=", "href=", "url("))


class Killed(BaseException):
    """A simulated end of the process."""


def test_killed_sweep_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_speed, "time_models", lambda *_, **__: bench_of_release(0, 2.5))  # timing takes 30 s
    words = ("--sparsity", "0.25,0.5", "--preset", "best,none", "--bench", "torch", "--batch", 1)
    whole = run_sweep(tmp_path / "whole", *words)
    reduced, timed = sweeping.SweepCache.reduce, SweepBench.time
    calls: list[str] = []

    def counted(self: sweeping.SweepCache, request: Any, watch: Any) -> Any:
        calls.append(request.slug)
        if len(calls) == 3:
            raise Killed
        return reduced(self, request)

    def timed_once(self: SweepBench, folder: Any, **more: Any) -> None:
        calls.append("time")
        if calls.count("time") == 2:
            raise Killed
        timed(self, folder, **more)

    def again(expected: list[str]) -> None:
        with pytest.raises(Killed):
            main([str(word) for word in sweep_words(tmp_path / "s", *words)], standalone_mode=False)
        assert calls == expected
        calls.clear()

    monkeypatch.setattr(sweeping.SweepCache, "reduce", counted)
    monkeypatch.setattr(SweepBench, "time", timed_once)
    slugs = ["best-mlp0.25-attn0.25", "best-mlp0.5-attn0.5", "none-mlp0.25-attn0.25", "none-mlp0.5-attn0.5"]
    again(slugs[:3])
    again([*slugs[2:], "time", "time"])
    monkeypatch.setattr(SweepBench, "time", timed)
    assert without_times(run_sweep(tmp_path / "s", *words)) == without_times(whole)
    assert calls == []
    left = sorted(path.name for folder in (tmp_path / "s/trials").iterdir() for path in folder.iterdir())
    assert left == sorted(["bench.json", "score.json", "timing.json"] * 4)


def test_cached_trials_are_reused_only_for_equal_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "none")
    reductions: list[str] = []
    reduced = sweeping.SweepCache.reduce

    def counted(self: sweeping.SweepCache, request: Any, watch: Any) -> Any:
        reductions.append(request.slug)
        return reduced(self, request)

    monkeypatch.setattr(sweeping.SweepCache, "reduce", counted)
    assert run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "none") == first
    assert reductions == []
    other = run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "none", moments="m12.safetensors")
    assert other[0]["images"] == 12
    run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "none", "--labels", home() / "labels.npy")
    assert reductions == ["none-mlp0.5-attn0.5"] * 2
    for score in (tmp_path / "s/trials").glob("*/score.json"):
        score.write_text(score.read_text()[:-40])  # a truncated score counts as missing
    assert run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "none")[0]["macs"] == first[0]["macs"]
    assert len(reductions) == 3


def ranks_below(launcher: int) -> list[int]:
    """Find the processes started by the torchrun that this launcher started."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = status.read_text().rpartition(")")
            parents[int(name.split()[0])] = int(rest.split()[1])
    torchruns = [child for child, parent in parents.items() if parent == launcher]
    return [child for child, parent in parents.items() if parent in torchruns]


@pytest.mark.nightly
@pytest.mark.slow("process")
def test_several_processes_give_equal_results_although_one_dies(tmp_path: Path) -> None:
    words = ("--sparsity", "0.25,0.5", "--preset", "none", "--parts", "mlp")
    alone = run_sweep(tmp_path / "alone", *words)
    timed = ("--bench", "torch", "--batch", 2, *QUICK)
    given_to = sweep_words(tmp_path / "s", *words, *timed, "--jobs", 2)
    process = Popen([sys.executable, "-m", "corp_deploy", *map(str, given_to)], stdout=DEVNULL, stderr=PIPE, text=True)
    for _ in range(600):
        if list((tmp_path / "s").glob("trials/*/score.json")) or process.poll() is not None:
            break
        time.sleep(0.05)
    for rank in ranks_below(process.pid)[-1:]:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    shared = trials_of(tmp_path / "s")
    assert without_times(shared) == without_times(alone)
    assert all(len(trial["speeds"]) == 1 for trial in shared)
    assert not list((tmp_path / "s/trials").glob("*/reduced"))


def test_every_option_is_tried_with_every_preset(tmp_path: Path) -> None:
    knobs = ("--select", "energy,wanda", "--repair", "none,affine", "--qk", "select")
    result = invoked(
        *sweep_words(tmp_path / "s", "--sparsity", 0.5, "--preset", "corp", *knobs, "--min-agreement", 0.01)
    )
    assert "smallest model with 1.00% agreement" in " ".join(result.stdout.split())
    trials = trials_of(tmp_path / "s")
    expected = [
        {"select": rank, "repair": repair, "qk": "select"}
        for rank, repair in product(("energy", "wanda"), ("none", "affine"))
    ]
    assert [trial["knobs"] for trial in trials] == expected
    errors = {(trial["knobs"]["select"], trial["knobs"]["repair"]): trial["relative_error"] for trial in trials}
    assert len(set(errors.values())) == 4
    front = [trial for trial in trials if trial["on_front"]]
    for trial in trials:
        assert any(one["macs"] <= trial["macs"] and one["relative_error"] <= trial["relative_error"] for one in front)
    assert "<svg" in (tmp_path / "s/sweep.svg").read_text()[:100]


def test_snapshots_show_how_many_images_suffice(tmp_path: Path) -> None:
    trials = run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "best", moments="m12.safetensors,m40.safetensors")
    assert [trial["images"] for trial in trials] == [12, 40]
    size = json.loads((tmp_path / "s/calibration-size.json").read_text())
    errors = [trial["relative_error"] for trial in trials]
    # Points have the mean error by image, trials that of all images.
    assert [point["relative_error"] for point in size["points"]] == pytest.approx(errors, rel=0.1)
    assert size["sentence"] in (tmp_path / "s/sweep.html").read_text()
    run_sweep(tmp_path / "s", "--sparsity", 0.5, "--preset", "best")
    assert not (tmp_path / "s/calibration-size.json").exists(), "an earlier sweep's answer"


def test_tables_are_written_even_if_no_trial_meets_the_agreement(tmp_path: Path) -> None:
    words = ("--sparsity", 0.75, "--preset", "none", "--min-agreement", 1)
    result = invoked(*sweep_words(tmp_path / "s", *words), code=2)
    assert "no trial agrees on 100.00% of the images, the best reaches" in result.stderr
    assert "relative" in result.stdout
    record = json.loads((tmp_path / "s/sweep.json").read_text())
    assert (len(record["trials"]), record["smallest_that_agrees"]) == (1, None)


def test_sweep_directory_is_locked_and_removed_if_empty(tmp_path: Path) -> None:
    with locked(tmp_path / "s", tmp_path / "s/.lock", what="sweep"):
        message = f"another sweep (process {os.getpid()} since 20"
        refuses(message, "sweep", *model_words(), "--sparsity", 0.5, "-o", tmp_path / "s")
    assert not (tmp_path / "s").exists()
    save(tiny.checkpoint(seed=5, depth=1), tmp_path / "other")
    words = ["--model", tmp_path / "other", *model_words()[2:]]
    invoked("sweep", *words, "--sparsity", 0.5, "-o", tmp_path / "s", code=2)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", 3), "--batch 3 has no effect on a sweep that times nothing"),
        (("--bench", "engine"), "say what builds them: --engine tensorrt-rtx"),
        (("--sm", "89"), "--sm names targets of engines"),
        (("--bench", "openvino", "--device", "cuda"), "--device cuda has no effect on OpenVINO"),
        (("--engine", "tensorrt-rtx", "--threads", 2), "--threads 2 has no effect on a sweep that builds engines"),
        (("--select", "energy", "--parts", "attn"), "--select selects channels, which --parts attn doesn't reduce"),
        (("--preset", "grail-fold", "--repair", "none", *MERGED), "can't repair"),
        (("--held-out", "x"), "--held-out judges how many images are enough"),
    ],
)
def test_options_without_effect_are_refused(words: tuple[object, ...], message: str, tmp_path: Path) -> None:
    refuses(message, "sweep", *model_words(), *words, "-o", tmp_path / "s")
    assert not (tmp_path / "s").exists()


# Pure parts


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
def test_pareto_front_is_undominated(points: list[tuple[int, ...]]) -> None:
    values = [tuple(map(float, point)) for point in points]
    beaten = {
        place
        for place, own in enumerate(values)
        for other in values
        if all(a <= b for a, b in zip(other, own, strict=True)) and any(a < b for a, b in zip(other, own, strict=True))
    }
    assert find_front(values) == set(range(len(values))) - beaten


def point(speedup: float, agreement: float, macs: int = 10, error: float = 0.1) -> SweepPoint:
    span = Interval(value=speedup, low=speedup, high=speedup)
    nothing: dict[str, Any] = dict.fromkeys(("p90_ms", "images_per_s", "dense_p50_ms", "dense_p90_ms"))
    nothing |= dict.fromkeys(("dense_images_per_s", "noise"))
    speed = SpeedAtBatch(
        batch=8, p50_ms=Interval(value=9.0, low=9.0, high=9.0), speedup=span, disturbed=False, **nothing
    )
    return SweepPoint(
        preset="best", geometry="padded", budget=None, macs=macs, parameters=1, relative_error=error,
        agreement=agreement, accuracy=None, sites_reduced=1, sites_refused=0, speeds=(speed,),
        mlp_sparsity=0.0, attention_sparsity=0.0, conv_sparsity=0.0, macs_share=0.5,
    )  # fmt: skip


def test_speed_and_agreement_have_their_own_front() -> None:
    points = [point(1.2, 0.99), point(1.5, 0.95), point(1.1, 0.98, macs=5), point(1.5, 0.94, error=0.05)]
    marked = mark_fronts(points)
    assert [each.fronts for each in marked] == [(8,), (8,), (), ()]
    assert [each.on_front for each in marked] == [False, False, True, True]
    assert fastest_that_agrees(points, 0.96) == {8: points[0]}
    assert fastest_that_agrees(points, 0.945) == {8: points[1]}


def test_best_k_trials_are_counted() -> None:
    logits = np.array([[3.0, 2.0, 1.0], [0.0, 2.0, 1.0]], dtype=np.float32)
    labels = np.array([1, 0])
    assert [top_k_accuracy(logits, labels, k) for k in (1, 2, 3, 5)] == [0.0, 0.5, 1.0, 1.0]


# Trials of new tensors run only the nodes that depend on them, and have the effects of whole passes.

IMAGES = 11  # one whole chunk of images and a part of another


@pytest.mark.parametrize("in_place", [False, True])
def test_partial_passes_equal_whole_passes(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """The first tensor, the last one or several change; with in-place nodes no intermediate value may be kept."""
    monkeypatch.setattr(probe, "changes_in_place", lambda node: in_place)
    program, images = tracing(tiny.checkpoint().model).running, torch.from_numpy(tiny.images(IMAGES))
    names = [str(node.target) for node in program.nodes if node.op == "get_attr"]
    chosen = [names[:1], names[-1:], names[len(names) // 3 :: 5]]
    changes = [{name: program.tensor(name) * 0.5 for name in each} for each in chosen]
    with torch.inference_mode():
        dense = as_tuple(program.graph(images))
        found = effects_of_new_tensors(program, images, changes, dense)
        for effect, change in zip(found, changes, strict=True):
            outputs = as_tuple(functional_call(program.graph, change, tuple(tensors_by_name(images).values())))
            shares = [tiny.relative(output, each) ** 2 for output, each in zip(outputs, dense, strict=True)]
            assert effect == pytest.approx(np.mean(shares), rel=1e-5)
    assert min(found) > 0.0


def test_unaffected_parts_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program, images = tracing(tiny.checkpoint().model).running, torch.from_numpy(tiny.images(4))
    last = [str(node.target) for node in program.nodes if node.op == "get_attr"][-1]
    ran, plain = list[str](), torch.fx.Interpreter.run_node

    def counted(self: torch.fx.Interpreter, n: torch.fx.Node) -> Any:
        ran.append(n.name)
        return plain(self, n)

    monkeypatch.setattr(torch.fx.Interpreter, "run_node", counted)
    with torch.inference_mode():
        dense = as_tuple(program.graph(images))
        effects_of_new_tensors(program, images, [{last: program.tensor(last) * 0.5}] * 3, dense)
    nodes = len(list(program.nodes))
    assert nodes < len(ran) < nodes + 3 * 10
    assert effects_of_new_tensors(program, images, [], dense) == []
