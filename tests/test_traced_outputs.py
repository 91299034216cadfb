"""Models of timm's that no family reads give maps and their head's output by name, dense and reduced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.family import answers, outputs_of, steps_to_outputs, with_outputs
from corp_deploy.families.traced_model import traced
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.outputs import Outputs, outputs_from_text
from corp_deploy.traced.models.steps import StreamState
from ground.errors import BadInput
from tests import tiny
from tests.traced_examples import DENSENET, PVT, checkpoint_of, images

NAMES = ("stage0_map", "feature1", "map", "logits")
SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 7
}  # fmt: skip
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


@pytest.mark.parametrize(
    ("name", "names", "kept"),
    [
        ("deit_tiny_distilled_patch16_224", "class,patches", {"class": [0], "patches": [*range(2, 18)]}),
        ("vit_small_patch16_dinov3", "class,patches", {"class": [0], "patches": [*range(5, 21)]}),
        ("beit_base_patch16_224", "class,patches", {"class": [0], "patches": [*range(1, 17)]}),
        ("cait_xxs24_224", "class,patches", {"class": [0], "patches": [*range(1, 17)]}),
        ("eva02_tiny_patch14_224", "tokens,class", {"tokens": [*range(17)], "class": [0]}),
        ("vit_relpos_small_patch16_rpn_224", "patches", {"patches": [*range(16)]}),
    ],
)
def test_every_kind_of_vit_gives_its_tokens(name: str, names: str, kept: dict[str, list[int]]) -> None:
    made: Any = timm.create_model(name, **SMALL).eval()
    tiny.enliven(made, 0)
    model, pixels = traced(made, Architecture(name=name, kwargs=SMALL)), torch.from_numpy(images(2, seed=1))
    with torch.no_grad():
        given = with_outputs(model, outputs_from_text(names))(pixels)
        tokens = made.forward_features(pixels)
    for each, got in zip(names.split(","), given if isinstance(given, tuple) else (given,), strict=True):
        wanted = tokens[:, kept[each]]
        torch.testing.assert_close(got, wanted[:, 0] if each == "class" else wanted, msg=each)


def test_a_class_token_that_comes_later_is_refused_before() -> None:
    made = timm.create_model("cait_xxs24_224", **SMALL)
    reason = "block0_class: the model has no class token there; its tokens are patch"
    with pytest.raises(BadInput, match=reason):
        with_outputs(
            traced(made, Architecture(name="cait_xxs24_224", kwargs=SMALL)), outputs_from_text("class,block0_class")
        )


def test_what_a_model_has_not_is_refused() -> None:
    model = dense_from_architecture(PVT)
    for asked, reason in (("stage7_map", "it has stage0, stage1, feature0, feature1"), ("pooled", "head gives logits")):
        with pytest.raises(BadInput, match=reason):
            with_outputs(model, Outputs((asked,)))


def test_a_module_of_its_own_says_its_outputs_itself() -> None:
    own = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
    model = traced(own, Architecture(name="own", family="module"))
    with pytest.raises(BadInput, match="a module of your own says them itself"):
        with_outputs(model, Outputs(("map",)))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("vit_tiny_patch16_224", "block0_map,class,block1_norm,patches"),
        ("vit_tiny_patch16_224", "class,patches"),
        ("swin_tiny_patch4_window7_224", "stage0_map,pooled"),
    ],
)
def test_a_walk_by_steps_meets_every_output(name: str, names: str) -> None:
    """Behind each cut of the stream, as of a model of one output."""
    kwargs = SMALL | {"num_classes": 0}
    if "swin" in name:
        kwargs = {"img_size": 32, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2), "window_size": 4}
        kwargs |= {"num_classes": 0}
    made = timm.create_model(name, **kwargs).eval()
    tiny.enliven(made, 0)
    dense = traced(made, Architecture(name=name, kwargs={"img_size": 32}))
    model, pixels = with_outputs(dense, outputs_from_text(names)), torch.from_numpy(images(3, seed=1))
    with torch.no_grad():
        walk = StreamState.of(traced_model.embedded(model, pixels), None)
        for step in steps_to_outputs(model):
            walk = walk.behind(step)
        for got, wanted in zip(answers(model, walk, pixels), model(pixels), strict=True):
            torch.testing.assert_close(got, wanted)
    assert [step.name for step in traced_model.steps(model)] == [step.name for step in traced_model.steps(dense)]
