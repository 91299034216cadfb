"""Models of timm's that no family reads give maps and their head's output by name, dense and reduced."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import outputs_of, with_outputs
from corp_deploy.families.outputs import Outputs
from corp_deploy.families.traced_model import traced
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from ground.errors import BadInput
from tests.traced_examples import DENSENET, PVT, checkpoint_of, images

NAMES = ("stage0_map", "feature1", "map", "logits")
MAMBA = Architecture(
    name="mambaout_femto", kwargs={"dims": [16, 32], "depths": [1, 1], "num_classes": 7, "img_size": 32}
)


def named(architecture: Architecture, *names: str) -> Checkpoint:
    dense = checkpoint_of(architecture)
    return replace(dense, model=with_outputs(dense.model, Outputs(names)))


@pytest.mark.parametrize("architecture", [PVT, MAMBA], ids=lambda each: each.name)
def test_they_are_what_timm_takes(architecture: Architecture) -> None:
    """Maps have channels first, wherever the model has them; the last one is what the head reads."""
    model, pixels = named(architecture, *NAMES).model, torch.from_numpy(images(3, seed=1))
    plain = timm.create_model(architecture.name, **{k: v for k, v in architecture.kwargs.items() if k != "img_size"})
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        first, tokens, last, logits = model(pixels)
        maps = plain.eval().forward_intermediates(pixels)[1]  # type: ignore[operator]
        assert torch.equal(first, maps[0])
        assert torch.equal(tokens, maps[1].flatten(2).mT)
        torch.testing.assert_close(logits, plain(pixels))
    assert last.shape == maps[-1].shape
    assert outputs_of(model) == Outputs(NAMES)


@pytest.mark.slow("graph")
@pytest.mark.parametrize(
    ("architecture", "names"), [(PVT, NAMES), (DENSENET, ("feature1_map", "logits")), (MAMBA, ("stage1_map", "map"))]
)
def test_they_stay_in_what_is_reduced(architecture: Architecture, names: tuple[str, ...], tmp_path: Path) -> None:
    dense = named(architecture, *names)
    np.save(tmp_path / "calibration.npy", images(48, seed=1))
    moments = calibrate(dense, images_for_model(dense.model, tmp_path / "calibration.npy"), batch_size=16)
    aligned = {"align_hidden": 4, "align_head": 4, "align_conv": 4}
    half = method_from_preset("best", mlp_sparsity=0.5, conv_sparsity=0.5, **aligned)
    reduced = replace(dense, model=reduce(dense.model, moments, half).model)
    save(reduced, tmp_path / "reduced")
    loaded = load_checkpoint(tmp_path / "reduced")
    assert outputs_of(loaded.model) == Outputs(names)
    export_checkpoint(loaded, tmp_path / "reduced.onnx", precision="fp32")
    pixels = images(3, seed=2)
    given = onnxruntime.InferenceSession(tmp_path / "reduced.onnx").run(list(names), {"images": pixels})
    with torch.no_grad():
        expected, before = (each.model(torch.from_numpy(pixels)) for each in (loaded, dense))
    for got, wanted, was in zip(given, expected, before, strict=True):
        assert np.abs(got - wanted.numpy()).max() < 1e-4 * wanted.abs().max()
        assert 1e-4 < (wanted - was).norm() / was.norm() < 0.7


def test_what_a_model_has_not_is_refused() -> None:
    models = {each.name: dense_from_architecture(each) for each in (PVT, DENSENET)}
    for name, asked, reason in (
        ("pvt_v2_b0", "stage7_map", "it has stage0, stage1, feature0, feature1"),
        ("pvt_v2_b0", "class", "maps and their places are known, neither class tokens"),
        ("pvt_v2_b0", "stage0_norm", "maps and their places are known, neither class tokens"),
        ("pvt_v2_b0", "pooled", "the model's head gives logits"),
        ("densenet121", "block0_map", "it has feature0, feature1, feature2"),
    ):
        with pytest.raises(BadInput, match=re.escape(reason)):
            with_outputs(models[name], Outputs((asked,)))


def test_a_module_of_its_own_says_its_outputs_itself() -> None:
    own = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
    model = traced(own, Architecture(name="own", family="module"))
    with pytest.raises(BadInput, match="a module of your own says them itself"):
        with_outputs(model, Outputs(("map",)))
