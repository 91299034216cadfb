"""The benchmark of dense heads on a reduced backbone, on a backbone and crops that take seconds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.quality.procedural_images import TEXTURES
from benchmarks.real import dense_features
from benchmarks.real.head import SaliencyHead, load_head
from benchmarks.real.mosaics import class_maps, linear_head, mosaics
from benchmarks.real.page import dense_features as table
from benchmarks.real.subject import Subject
from tests.test_real_vit import in_this_process
from tests.test_real_vit import ready as ready


def test_a_mosaic_has_a_class_for_each_patch_and_no_two_draws_alike() -> None:
    drawn = mosaics(3, size=32, patch=4, seed=0)
    assert (drawn.images.shape, drawn.classes.shape) == ((3, 3, 32, 32), (3, 64))
    grid = drawn.classes.reshape(3, 8, 8)
    cells = grid[:, ::2, ::2]
    assert torch.equal(grid, cells.repeat_interleave(2, 1).repeat_interleave(2, 2))
    assert set(drawn.classes.flatten().tolist()) <= set(range(len(TEXTURES)))
    assert torch.equal(mosaics(3, size=32, patch=4, seed=0).images, drawn.images)
    assert not torch.equal(mosaics(3, size=32, patch=4, seed=1).images, drawn.images)


def test_a_linear_head_finds_what_is_planted() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(len(TEXTURES), 12, generator=generator)
    classes = torch.randint(0, len(TEXTURES), (5, 40), generator=generator)
    patches = centres[classes] + 0.1 * torch.randn(5, 40, 12, generator=generator)
    head = linear_head(patches, classes)
    assert float((class_maps(head, patches) == classes).double().mean()) > 0.99
    x = np.concatenate([patches.flatten(0, 1).double().numpy(), np.ones((200, 1))], axis=1)
    exact = np.linalg.lstsq(x, np.eye(len(TEXTURES))[classes.flatten()], rcond=None)[0]
    own = np.concatenate([head.weight.double().numpy().T, head.bias.double().numpy()[None]])
    assert np.linalg.norm(x @ (own - exact)) < 0.05 * np.linalg.norm(x @ exact), "but for the ridge"


@pytest.mark.slow("graph")
def test_heads_are_read_behind_graphs(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_features, "run", in_this_process)
    monkeypatch.setattr(dense_features, "NAMES", ("best",))
    output = ready.parent / "dense_features.json"
    given = ["--output", str(output), "--ready", str(ready), "--work", str(ready.parent / "work"), "--mosaics", "4"]
    threads = torch.get_num_threads()
    # The stand-in's patches are of 8 pixels.
    monkeypatch.setattr(Subject, "head", property(lambda self: _of_patches(load_head(self.ready / "head.safetensors"))))
    try:
        done = CliRunner().invoke(dense_features.main, [*given, "--crops", "12", "--held-out", "6"])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, (done.output, done.exception)
    record: dict[str, Any] = json.loads(output.read_text())
    (row,) = record["rows"]
    links = {link["link"]: link for link in row["links"]}
    assert len(links) == 12
    maps, whole = (links[f"{kind} saliency"] for kind in ("features", "whole"))
    assert maps["relative_error"] == pytest.approx(whole["relative_error"], rel=0.2)
    assert 0.0 <= maps["iou_worst"] <= maps["iou"] <= 1.0
    assert [link["kind"] for link in row["links_of_mosaics"]] == ["reduced", "exact", "half", "whole"]
    assert 0.0 < row["links_of_mosaics"][0]["pixel_agreement"] <= 1.0
    own = {name: row["linear"][name] for name in ("dense_accuracy", "accuracy")}
    assert all(0.0 < share <= 1.0 for share in own.values()), own
    assert links["whole patches"]["linear_cka"] > 0.0
    assert links["whole class"]["neighbour_agreement"] is not None
    text = table(record)
    assert "| best |" in text
    assert "4 mosaics" in text


def _of_patches(head: SaliencyHead) -> SaliencyHead:
    head.patch = 8
    return head
