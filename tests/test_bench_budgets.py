"""The benchmark of budgets, on a model that takes seconds: rows by both curves, kept and shown."""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.pages.accuracy_page import budgets as table
from benchmarks.quality import budgets, polish
from benchmarks.quality.procedural_images import made
from corp_deploy.reduction.method import method_from_preset
from tests import tiny


def subject(scratch: Path) -> polish.Subject:
    dense = tiny.checkpoint()
    dense.model.requires_grad_(False)
    judged = torch.from_numpy(tiny.images(16, seed=3))
    return polish.Subject(
        name="tiny",
        dense=dense,
        inputs=tiny.opened(scratch / "images.npy", tiny.images(32), dense.model),
        groups_B=None,
        method=method_from_preset("best", align_hidden=16, align_head=8),
        closed_loop=False,
        error=partial(polish.error, polish.outputs(dense.model, judged), judged),
    )


@pytest.mark.slow("models")
def test_rows_are_made_by_both_curves_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "SUBJECTS", {"tiny": subject})
    output = tmp_path / "budgets.json"
    for shares in ("0.7", "0.7,0.5"):
        words = ["--output", str(output), "--models", "tiny", "--shares", shares]
        done = CliRunner().invoke(budgets.main, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    record = json.loads(output.read_text())
    assert [row["share"] for row in record["rows"]] == [0.7, 0.5]
    for row in record["rows"]:
        assert min(row[way] for way in budgets.WAYS) > 0.0
        tried = {name: error for name, error in row["ways"].items() if name.startswith("by site")}
        assert row["taken_is"] == min(tried, key=tried.__getitem__)
    assert f"| tiny | 0.7 | {record['rows'][0]['before']:.4f} |" in table(record)


def test_curves_of_before_keep_values_and_look_at_half_of_the_widths(tmp_path: Path) -> None:
    curves = budgets.curves_of(subject(tmp_path))
    own = {curve.site: curve for curve in curves.planner.curves}
    for curve in curves.before:
        assert set(curve.widths) < set(own[curve.site].widths)
        assert curve.errors[-1] == 0.0
        assert all(one >= other for one, other in pairwise(curve.errors))


def test_the_procedural_model_is_fitted_and_judged_on_different_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "CACHE", tmp_path / "absent")
    monkeypatch.setattr(budgets, "trained", lambda directory: tiny.checkpoint(img_size=64))
    monkeypatch.setattr(budgets, "made", lambda part, count: made(part, count // 64))
    procedural = budgets.procedural(tmp_path)
    assert procedural.inputs.count == 8
    (fitted,) = procedural.inputs.batches(8)
    assert torch.equal(torch.as_tensor(fitted), torch.from_numpy(made("train", 8).images))
    assert procedural.error(procedural.dense.model) == 0.0
