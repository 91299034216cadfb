"""The benchmark of convolutional networks, on few images and rounds, and its page."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import convnets
from benchmarks.convnets_page import convnets as page
from benchmarks.real.record import Record
from corp_deploy.families.model_cost import macs
from corp_deploy.families.widths import ConvWidths
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
    (removed,) = {row["removed_of_sites"] for row in rows}
    assert removed == pytest.approx(0.5, abs=0.02)
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
    """Against the MACs of the narrower model itself."""
    own = small_convnets.checkpoint("resnet18d")
    widths, removed = convnets.nearest(own.model, 0.5, 8, convnets.of_model)
    assert all(isinstance(width, ConvWidths) for width in widths.values())
    narrower = convnets.randomly(own, widths)
    assert removed == pytest.approx(1.0 - macs(narrower.model) / macs(own.model), abs=1e-12)
    for parameter in narrower.model.parameters():
        assert torch.isfinite(parameter).all()
