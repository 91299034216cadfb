"""The benchmark of convolutional networks, on few images and rounds, and its page."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.pages.convnets_page import convnets as page
from benchmarks.quality import convnets
from benchmarks.real.record import Record
from corp_deploy.families.model_cost import macs
from corp_deploy.families.traced_narrowing import at_widths
from corp_deploy.store.dense_model import model_of_directory
from tests import small_convnets


@pytest.mark.slow("training")
def test_every_way_is_measured_once_at_equal_widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convnets, "SEEDS", (0,))
    record = Record(tmp_path / "record.json", convnets.KIND, {"calibration_images": 64})
    dense = model_of_directory(convnets.DIGITS)
    convnets.add_methods(record, dense, (0.5,), 64)
    rows = record["rows"]
    assert [row["way"] for row in rows] == [way.name for way in convnets.WAYS]
    (removed,) = {row["removed_of_model"] for row in rows}
    assert removed == pytest.approx(0.5, abs=0.05)
    errors = {row["way"]: row["relative_error"] for row in rows}
    assert errors["best, closed loop"] < 0.5 * errors["grail, symmetric closed loop"]
    assert errors["best"] < 0.5 * errors["grail"] < errors["none"]
    monkeypatch.setattr(convnets, "reduced", pytest.fail)
    again = Record(tmp_path / "record.json", convnets.KIND, {"calibration_images": 64})
    convnets.add_methods(again, dense, (0.5,), 64)  # all are there
    text = page(json.loads((tmp_path / "record.json").read_text()))
    assert "| best, closed loop |" in text
    assert "means of 1 choices of images" in text


@pytest.mark.slow("training")
def test_shares_removed_are_those_of_the_models_that_are_made() -> None:
    """The nearest that a percent gives."""
    own = small_convnets.checkpoint("resnet18d")
    widths, removed = convnets.nearest(own.model, 0.5, 8)
    narrower = at_widths(own.model, widths)
    assert removed == 1.0 - macs(narrower) / macs(own.model)
    assert removed == pytest.approx(0.5, abs=0.1)
    for parameter in narrower.parameters():
        assert torch.isfinite(parameter).all()
