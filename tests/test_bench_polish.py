"""The benchmark of polishing, on sizes that take seconds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pages import polish_page
from benchmarks.quality import polish
from benchmarks.real.record import Record
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.store.inputs import images_for_model
from tests import tiny


def test_a_row_has_the_errors_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polish, "VARIANTS", {"model": PolishOptions(how="model", steps=5, batch_size=4)})
    dense = tiny.checkpoint()
    np.save(tmp_path / "images.npy", tiny.images(24))
    judged = torch.from_numpy(tiny.images(8, seed=5))
    subject = polish.Subject(
        name="tiny",
        dense=dense,
        inputs=images_for_model(dense.model, tmp_path / "images.npy"),
        groups_B=None,
        method=method_from_preset("best", mlp_sparsity=0.5, align_hidden=8),
        closed_loop=True,
        error=lambda candidate: polish.error(polish.outputs(dense.model, judged), judged, candidate),
    )
    record = Record(tmp_path / "record.json", polish.KIND, {"threads": 1})
    for _ in range(2):  # the second time the record has it
        polish.rows_of(subject, ["model"], record, None)
    (row,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert subject.error(dense.model) == 0.0
    assert row["error_before"] == subject.error(subject.reduced())
    assert row["held_out_error"] <= row["held_out_error_before"]
    assert row["steps"] == 5
    assert row["parts"][0]["curve"][-1]["step"] == 5


def test_the_page_has_errors_before_and_after_and_says_what_was_not_improved() -> None:
    row = {"model": "digits", "polish": "block", "steps": 720, "seconds": 90.0, "error_before": 0.5, "error": 0.25}
    page = polish_page.polish({"threads": 1, "rows": [row], "remarks": ["Said beside it."]})
    assert "| digits | block | 720 | 1.5 | 0.5000 | 0.2500 |" in page
    assert "1 thread)" in page
    assert page.endswith("Said beside it.")
    fits = {"rows": [{"model": "MiniLM", "how": "Adam, 40 steps a sublayer", "error": 0.351, "cpu_seconds": 61.4}]}
    assert "| MiniLM | Adam, 40 steps a sublayer | 0.3510 | 61 |" in polish_page.layer_polish(fits)
