"""The papers' tables of a tiny model: their layout, cells against a computation of their own, what was printed."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from benchmarks.reproduce import tables
from benchmarks.reproduce.page import page
from benchmarks.reproduce.papers import figure, printed
from benchmarks.reproduce.runs import Subject, calibrated
from benchmarks.reproduce.tables import TABLES
from corp_deploy.store.checkpoint import load_checkpoint
from tests import tiny

pytestmark = pytest.mark.nightly

FOLDER = TemporaryDirectory()
HOME = Path(FOLDER.name)


@cache
def subject() -> Subject:
    tiny.written(HOME, 40, to="calibration.npy", depth=1)
    np.savez(HOME / "held-out.npz", images=tiny.images(20, seed=1), labels=np.arange(20) % 7)
    made = Subject(
        name="tiny", model=(str(HOME / "dense"),), calibration=HOME / "calibration.npy",
        held_out=HOME / "held-out.npz", labels=HOME / "held-out.npz", home=HOME / "runs", snapshots=(16,),
        align="mlp=8,head=8,conv=8", bench=None,
    )  # fmt: skip
    calibrated(made)
    return made


def accuracy(directory: Path) -> float:
    images = torch.from_numpy(np.load(HOME / "held-out.npz")["images"])
    with torch.inference_mode():
        answers = load_checkpoint(directory).model(images).argmax(1).numpy()
    return round(100 * float((answers == np.arange(20) % 7).mean()), 2)


@pytest.mark.parametrize("key", ["2", "3", "10", "9"])
def test_tables_have_the_papers_columns(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "STEPS", (0.25, 0.5))
    table = TABLES[key](subject())
    of_paper = printed("corp-v2", key)["columns"]
    assert len(table.columns) == len(of_paper) if key != "3" else table.columns[0] == of_paper[0]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert f"| {table.columns[0]} |" in page("t", [table])


def test_cells_come_from_the_measured_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "STEPS", (0.25, 0.5))
    rows = TABLES["10"](subject()).rows
    dense = next(row for row in rows if row[1] == 0.0)
    assert dense[2] == accuracy(HOME / "dense")
    weights = load_checkpoint(HOME / "dense").model.parameters()
    assert dense[3] == round(sum(weight.numel() for weight in weights) / 1e6, 3)
    assert [row[1] for row in rows[:3]] == [0.0, 0.25, 0.5]
    assert rows[2][7] > rows[1][7]  # type: ignore[operator]
    assert {row[5] for row in rows} == {"not timed"}
    by_images = TABLES["3"](subject()).rows
    assert [row[0] for row in by_images] == [16, 40]
    assert by_images[-1][1] == TABLES["2"](subject()).rows[0][12]


@pytest.mark.slow("models")
@pytest.mark.parametrize(("key", "rows"), [("fig5", 4), ("grail2", 7), ("6", 2), ("deploy", 1)])
def test_figures_and_audits_are_shown(key: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RATIOS", (0.5,))
    table = TABLES[key](subject())
    assert len(table.rows) == rows
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_printed_tables_are_complete() -> None:
    ten = printed("corp-v2", "10")["rows"]
    assert len(ten) == 40
    for model, sparsity, _, parameters, flops, _, rate, fewer, less, gain in ten:
        dense = next(row for row in ten if row[0] == model and row[1] == 0.0)
        assert 100 * (1 - parameters / dense[3]) == pytest.approx(fewer, abs=1.5), (model, sparsity)
        assert 100 * (1 - flops / dense[4]) == pytest.approx(less, abs=5.5), (model, sparsity)
        assert rate / dense[6] == pytest.approx(gain, abs=0.05)
    for row in printed("marchenko-pastur", "4")["rows"]:
        assert row[4] / row[3] == pytest.approx(row[5], abs=0.002)
    for row in printed("corp-v2", "6")["rows"]:
        assert sum(row[2:5]) == pytest.approx(row[5], abs=1.0)
    assert all("no numbers printed" in figure(paper, name) for paper, name in (("corp-v2", "2"), ("grail", "2")))
