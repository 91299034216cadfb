"""Saving and loading: the same model comes back, and everything else is refused with a message."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import resnet26d
from timm.models.vision_transformer_hybrid import _cfg, _create_vision_transformer_hybrid
from torch import nn

import corp_deploy
from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.spec.trusted_code import trusting_code
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from corp_deploy.traced.models.module import replaced
from corp_deploy.traced.models.narrowing import at_widths
from ground.errors import BadInput
from ground.files import sha256_of_file
from tests import tiny
from tests.refusals import rejects

NARROW = {"blocks.0.mlp": 40, "blocks.1.attn.qk": 24}


def reduced_checkpoint() -> Checkpoint:
    dense = tiny.checkpoint()
    return replace(dense, model=at_widths(dense.model, NARROW), lineage={"preset": "x"})


def test_a_reduced_model_comes_back_with_its_widths_and_outputs(tmp_path: Path) -> None:
    reduced = reduced_checkpoint()
    save(reduced, tmp_path)
    again = load_checkpoint(tmp_path)
    images = torch.from_numpy(tiny.images(2))
    torch.testing.assert_close(corp_deploy.load(tmp_path)(images), reduced.model(images), rtol=1e-5, atol=1e-5)
    assert again.lineage == {"preset": "x"}
    assert {site.name: site.width for site in sites_of(again.model).every if site.name in NARROW} == NARROW
    assert not any(parameter.is_meta for parameter in again.model.parameters())


def test_a_copy_with_other_modules_leaves_the_given_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = replaced(model, {"0": nn.Linear(4, 3)})
    assert new.get_parameter("0.weight").shape == (3, 4)
    assert new.get_parameter("1.0.weight") is not model.get_parameter("1.0.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow("process")
def test_loading_needs_no_pruning_code(tmp_path: Path) -> None:
    save(reduced_checkpoint(), tmp_path)
    program = (
        "import sys, corp_deploy; assert 'torch' not in sys.modules; corp_deploy.load(sys.argv[1]);"
        "loaded = [m for m in sys.modules if m.startswith('corp_deploy.')];"
        "assert not [m for m in loaded if 'reduce' in m or 'recover' in m or 'select' in m or 'obs' in m], loaded"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], check=True, cwd=Path(__file__).parents[1]
    )


def _dense(weights: Path) -> Checkpoint:
    return load_dense(tiny.ARCHITECTURE.name, weights=weights, kwargs=tiny.ARCHITECTURE.kwargs)


def test_missing_corrupt_and_foreign_weights(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    rejects("expected a state_dict", _dense, tmp_path / "list.pt")
    rejects("no such file", _dense, tmp_path / "none.safetensors")
    for name in ("w.safetensors", "w.pth"):
        (tmp_path / name).write_bytes(b"\x00\x01not weights" * 10)
        rejects("can't be read", _dense, tmp_path / name)
    (tmp_path / "w.npz").write_bytes(bytes(9))
    rejects(r"no known kind of weights, expected \.safetensors, \.pth", _dense, tmp_path / "w.npz")


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    state = tiny.checkpoint().model.state_dict()
    wrong = {**state, "head.weight": torch.zeros(3, 48), "extra": torch.zeros(1)}
    del wrong["norm.bias"]
    save_file(wrong, tmp_path / "w.safetensors")
    with pytest.raises(
        BadInput,
        match=r"missing: norm.bias; unexpected: extra; wrong shape: head.weight \(3, 48\) instead of \(7, 48\)",
    ):
        _dense(tmp_path / "w.safetensors")
    state["blocks.0.mlp.fc1.bias"][3] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")
    rejects(r"NaN or Inf in blocks.0.mlp.fc1.bias", _dense, tmp_path / "nan.safetensors")


def test_names_and_directories_are_not_mixed_up(tmp_path: Path) -> None:
    save(tiny.checkpoint(), tmp_path)
    rejects("drop --weights", load_dense, str(tmp_path), weights=tmp_path / "model.safetensors", kwargs={})
    rejects("needs --weights", load_dense, "deit_tiny_patch16_224", weights=None, kwargs={})
    rejects("deit_tiny_patch16_224", load_dense, "deit_tiny_patch16_999", weights=None, kwargs={})
    rejects("no_such_argument", load_dense, "deit_tiny_patch16_224", weights=None, kwargs={"no_such_argument": 1})


def test_damaged_directories(tmp_path: Path) -> None:
    rejects("no such file", load_checkpoint, tmp_path)
    save(tiny.checkpoint(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    rejects("changed or cut off", load_checkpoint, tmp_path)
    weights.unlink()
    rejects("no such file", load_checkpoint, tmp_path)
    config = tmp_path / "config.json"
    record = json.loads(config.read_text())
    for change, said in (({"kind": "other"}, "expected a corp-deploy/model record"), ({"version": 2}, "version 2")):
        config.write_text(json.dumps(record | change))
        rejects(said, load_checkpoint, tmp_path)
    config.write_text("{")
    rejects("not JSON", load_checkpoint, tmp_path)


# Directories of version 0.1 whose networks had their norms taken into convolutions, or blocks of that version's own:

GOLDEN = Path(__file__).with_name("golden") / "folded"
QUICK = ("eva-heads", "relpos-half", "own_module-half", "maxvit_tiny_pm_256-padded")
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("models"))
    for name in sorted(path.name for path in GOLDEN.iterdir())
]
default_cfgs = generate_default_cfgs({"small_hybrid.untrained": _cfg(input_size=(3, 64, 64))})


@register_model
def small_hybrid(**kwargs: Any) -> nn.Module:
    """Three stages of a ResNet with a deep stem in front of two blocks."""
    stages = {"layers": [1, 1, 1, 1], "channels": [16, 24, 32, 40], "stem_width": 8}
    backbone = resnet26d(features_only=True, out_indices=[3], **stages)
    of_vit: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 1}
    model: nn.Module = _create_vision_transformer_hybrid("small_hybrid", backbone=backbone, **{**of_vit, **kwargs})
    return model


def answers(model: nn.Module) -> torch.Tensor:
    return tiny.ran(model, tiny.images(3, 0, image_spec(model).shape[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_said(name: str, tmp_path: Path) -> None:
    """Blocks with squeezes and narrower streams, a site of which a constant is left, a norm over the image, attentions
    with narrower queries, in windows, of fewer heads, named ones of an own module; what is written of it today as well.
    """
    with trusting_code(True):
        checkpoint = load_checkpoint(GOLDEN / name)
    expected = np.array(json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8")))
    np.testing.assert_allclose(answers(checkpoint.model), expected, rtol=1e-4, atol=1e-5)
    save(checkpoint, tmp_path)
    with trusting_code(True):
        again = load_checkpoint(tmp_path).model
    torch.testing.assert_close(answers(again), answers(checkpoint.model), rtol=1e-5, atol=1e-5)


def edited(name: str, home: Path, site: str, entry: dict[str, Any], weights: dict[str, torch.Tensor | None]) -> Path:
    """A copy of a directory in which a site says this, with these weights in place of others, or without them."""
    shutil.copytree(GOLDEN / name, home / "model")
    written, said = home / "model" / "model.safetensors", home / "model" / "config.json"
    own = {key: each for key, each in {**load_file(written), **weights}.items() if each is not None}
    save_file(own, written, metadata={"format": "pt"})
    config = json.loads(said.read_text(encoding="utf-8"))
    config["sites"][site] |= entry
    config["weights_sha256"] = sha256_of_file(written)
    said.write_text(json.dumps(config), encoding="utf-8")
    return home / "model"


@pytest.mark.parametrize("name", ["small_hybrid-all", "eva02-half"])
def test_an_attention_of_which_a_constant_is_left_adds_its_bias(name: str, tmp_path: Path) -> None:
    """As one whose values are all zero does."""
    own = load_file(GOLDEN / name / "model.safetensors")
    names = [f"blocks.0.attn.{each}" for each in ("qkv.weight", "qkv.bias", "proj.weight")]
    silent: dict[str, torch.Tensor | None] = {names[2]: torch.zeros_like(own[names[2]])}
    nothing = {names[0]: own[names[0]][:0].clone(), names[1]: own[names[1]][:0].clone(), names[2]: own[names[2]][:, :0]}
    zeros = edited(name, tmp_path / "zeros", "blocks.0.attn", {}, silent)
    constant = {key: each.contiguous() for key, each in nothing.items()}
    turned = dict.fromkeys(key for key in own if key.startswith("blocks.0.attn.rotary."))
    empty = edited(name, tmp_path / "empty", "blocks.0.attn", {"qk": 0, "v": 0}, {**constant, **turned})
    expected, found = (answers(load_checkpoint(each).model) for each in (zeros, empty))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_attention_without_its_widths_is_one_message(tmp_path: Path) -> None:
    directory = edited("small_hybrid-all", tmp_path, "blocks.0.attn", {}, {})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["sites"]["blocks.0.attn"] = {"hidden": 8, "input_bias": True, "output_bias": True}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rejects(r"'blocks\.0\.attn' has no heads, qk and v; the file was edited", load_checkpoint, directory)


def test_positions_whose_network_was_not_written_are_one_message(tmp_path: Path) -> None:
    directory = edited("maxvit_tiny_tf_224-square", tmp_path, "stages.0.blocks.0.attn_grid.attn", {}, {})
    written = (directory / "config.json").read_text(encoding="utf-8")
    (directory / "config.json").write_text(written.replace("maxvit_tiny_tf_224", "maxvit_rmlp_tiny_rw_256"), "utf-8")
    rejects(r"MaxxVit that version 0\.1 wrote.* reduce the dense model again", load_checkpoint, directory)


def test_weights_of_another_width_or_none_are_one_message(tmp_path: Path) -> None:
    """Turned queries, and a layer whose rows are others than those of the layer that reads it has columns."""
    directory = edited("eva02-half", tmp_path / "turned", "blocks.1.attn", {"qk": 6}, {})
    rejects(r"the weights of 'blocks\.1\.attn' are of other widths than its entry", load_checkpoint, directory)
    name = "layer1.0.conv1.weight"
    weight = load_file(GOLDEN / "seresnet50-both" / "model.safetensors")[name]
    directory = edited("seresnet50-both", tmp_path / "rows", "layer1.0", {}, {name: weight[:3].clone()})
    rejects(r"model\.safetensors: these weights don't fit.*layer1\.0\.conv", load_checkpoint, directory)
