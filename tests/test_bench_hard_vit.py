"""The benchmark of a ViT in which nothing is to spare: its training terms, its figures, its rows and its table."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.pages.accuracy_page import hard_vit as table
from benchmarks.quality import hard_training, hard_vit
from benchmarks.quality.hard_training import correlation, labels_by_band, unevenness
from benchmarks.quality.procedural_images import WAVELENGTHS, made
from benchmarks.real.record import Record
from corp_deploy.polish import options
from corp_deploy.store.checkpoint import load_checkpoint
from ground.errors import BadInput


def test_the_terms_that_make_it_hard_are_what_they_say() -> None:
    assert unevenness(torch.full((2, 5), 3.0)) == 0.0
    assert unevenness(torch.tensor([1.0, float(np.e) ** 2])) == pytest.approx(1.0)
    values = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(0))
    values[..., 3] = values[..., 0] * 2.0 + 1.0
    expected = 0.0
    for group in values.double().numpy():
        squares = np.corrcoef(group, rowvar=False) ** 2
        expected += np.mean([squares[i, j] for i in range(4) for j in range(4) if i != j]) * 4 / 2
    assert float(correlation(values)) == pytest.approx(expected, rel=1e-4)


def test_labels_are_the_class_and_the_third_of_the_wavelengths() -> None:
    labelled = made("train", 60)
    low, high = WAVELENGTHS
    assert ((labelled.wavelengths >= low) & (labelled.wavelengths < high)).all()
    for label, plain, wavelength in zip(labels_by_band(labelled), labelled.labels, labelled.wavelengths, strict=True):
        band = 0 if wavelength < 26 / 3 else 1 if wavelength < 31 / 3 else 2
        assert label == plain * 3 + band


def test_figures_of_a_pair_of_models() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    dense = np.eye(2)[[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]
    reduced = np.eye(2)[[0, 1, 1, 0, 0, 1, 1, 1, 1, 1]]
    found = hard_vit.figures(dense, reduced, labels)
    assert (found["only_dense_right"], found["only_reduced_right"]) == (3, 1)
    assert found["accuracy"] == 0.7
    assert found["agreement"] == 0.6
    assert found["relative_error"] == pytest.approx(np.sqrt(8 / 10))
    change = np.array([0, -1, -1, 1, -1, 0, 0, 0, 0, 0])  # of each image's being right
    half = 100 * 1.959964 * change.std() / np.sqrt(10)
    assert found["points"] == pytest.approx([-20.0, -20.0 - half, -20.0 + half], rel=1e-5)
    assert hard_vit.figures(dense, dense, labels)["points"] == [0.0, 0.0, 0.0]


@pytest.mark.slow("training")
def test_it_trains_reduces_by_every_method_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hard_training.ARCHITECTURE
    monkeypatch.setattr(hard_training, "ARCHITECTURE", replace(whole, kwargs={**whole.kwargs, "depth": 1}))
    monkeypatch.setattr(hard_training, "DEPTH", 1)
    monkeypatch.setattr(hard_training, "BATCH", 8)
    monkeypatch.setattr(options, "STEPS", {"none": 0, "layer": 1, "block": 2, "model": 2})
    monkeypatch.setattr(hard_vit, "SPARSITIES", (0.5,))
    once = hard_training.trained(tmp_path / "one", images=16, epochs=2)
    hard_training.train(tmp_path / "two.pt", images=16, epochs=2)
    dense = load_checkpoint(tmp_path / "one")
    assert once.architecture.kwargs["num_classes"] == 72
    held = torch.load(tmp_path / "two.pt", weights_only=True)["model"]
    assert all(torch.equal(value, held[name]) for name, value in dense.model.state_dict().items())

    subject = hard_vit.Subject(dense, made("train", 32), made("held-out", 12), tmp_path)
    path, setting = tmp_path / "record.json", hard_vit.setting(subject)
    hard_vit.measure(subject, Record(path, hard_vit.KIND, setting))
    record = Record(path, hard_vit.KIND, setting)
    rows = {row["method"]: row for row in record["rows"]}
    assert list(rows) == [way.name for way in hard_vit.WAYS]
    assert rows["best, closed loop"]["macs_share"] == rows["none"]["macs_share"] < 1.0
    assert rows["thorough"]["macs_share"] <= rows["none"]["macs_share"]
    assert rows["best"]["relative_error"] < rows["none"]["relative_error"]
    assert f"| thorough | {rows['thorough']['macs_share']:.2f} |" in table(record.content)

    monkeypatch.setattr(hard_vit.Subject, "row", None)  # nothing is missing, so nothing is reduced
    hard_vit.measure(subject, record)
    with pytest.raises(BadInput, match="measured with another weights"):
        Record(path, hard_vit.KIND, setting | {"weights": "others"})
