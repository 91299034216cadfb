"""What slow tests look at closely, gone through once in the quick run: demo, release, graphs and tables of latency."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import sklearn  # noqa: F401  # for nothing but its time, which is not the demo's

import corp_deploy
from corp_deploy.demo import run as demo
from corp_deploy.demo.run import DemoScale
from corp_deploy.store.checkpoint import load_checkpoint, save
from tests import tiny
from tests.command import invoked
from tests.recipes import recipe

RECIPE = recipe(
    {
        "held_out": {"images": "held-out.npz", "labels": "held-out.npz"},
        "reduce": {"mlp": 0.5, "attn": 0.5, "align_mlp": 8, "align_head": 8},
        "parity": {"batches": [2], "max_error": 0.9},
        "gate": {"fail_if": ["params >= dense"]},
    }
)


def write_images(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "calibration.npy", tiny.images(14))
    np.savez(directory / "calibration.npz", images=tiny.images(14))
    np.savez(directory / "held-out.npz", images=tiny.images(11, seed=1), labels=np.arange(11) % 7)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save(tiny.checkpoint(depth=1), tmp_path / "dense")
    write_images(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> str:
    return invoked(*words).output


def test_demo_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "dense").rename(home / "model")
    monkeypatch.setattr(demo, "EXAMPLE", home)
    monkeypatch.setattr(demo, "write_images", write_images)
    monkeypatch.setattr(demo, "SCALE", DemoScale(samples=10, hold_out=4, batches=(2,), time_limit=0.3, types=()))
    assert "report: out/report.html" in run("demo", "-o", "out")
    dense, reduced = (load_checkpoint(home / "out" / name).model for name in ("dense", "reduced"))
    count = [sum(weight.numel() for weight in model.parameters()) for model in (dense, reduced)]
    assert count[1] < 0.9 * count[0]
    assert json.loads((home / "out" / "parity.json").read_text())["links"]


def test_release_runs(home: Path) -> None:
    (home / "recipe.toml").write_text(RECIPE)
    run("release", "recipe.toml", "-o", "out")
    files = json.loads((home / "out" / "manifest.json").read_text())["files"]
    there = {path.relative_to(home / "out").as_posix() for path in (home / "out").rglob("*") if path.is_file()}
    assert {"reduced/model.onnx", "bench.json", "parity.json", "gate.json", "report.html", "MODEL_CARD.md"} <= there
    assert files.keys() <= there


def test_python_graphs_are_timed(home: Path) -> None:
    """The other functions are looked at closely in test_api."""
    graph = corp_deploy.export(home / "dense", home / "model.onnx")
    same = shutil.copy(graph.path, home / "same.onnx")
    speed = corp_deploy.bench(graph.path, same, batches=(2,), time_limit=0.5, block_ms=1, half_width=0.9)
    assert [row.batch for row in speed.summary.rows] == [2]


def test_latency_table_is_measured(home: Path) -> None:
    align = ("--align", "mlp=192,head=16", "--heads", "square")
    run("latency-table", "--model", "dense", "--batch", "1", "--backend", "torch", *align, "-o", "tables")
    assert json.loads(min((home / "tables").glob("*.json")).read_text())["kind"] == "latency-table"
