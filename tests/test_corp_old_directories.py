"""Directories of version 0.1 whose networks had their norms taken into convolutions, or blocks of that version's own:
they say what they said then.
"""

import json
import shutil
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

from corp_deploy.families.family import image_spec
from corp_deploy.families.trusted_code import trusting_code
from corp_deploy.store.checkpoint import load_checkpoint, save
from ground.errors import BadInput
from ground.files import sha256_of_file
from tests import tiny

GOLDEN = Path(__file__).with_name("golden") / "folded"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
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
    pixels = torch.from_numpy(tiny.images(3, 0, image_spec(model).shape[-1]))
    with torch.inference_mode():
        out: torch.Tensor = model(pixels)
    return out


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
    with pytest.raises(BadInput, match=r"'blocks\.0\.attn' has no heads, qk and v; the file was edited"):
        load_checkpoint(directory)


def test_positions_whose_network_was_not_written_are_one_message(tmp_path: Path) -> None:
    directory = edited("maxvit_tiny_tf_224-square", tmp_path, "stages.0.blocks.0.attn_grid.attn", {}, {})
    written = (directory / "config.json").read_text(encoding="utf-8")
    (directory / "config.json").write_text(written.replace("maxvit_tiny_tf_224", "maxvit_rmlp_tiny_rw_256"), "utf-8")
    with pytest.raises(BadInput, match=r"MaxxVit that version 0\.1 wrote.* reduce the dense model again"):
        load_checkpoint(directory)


def test_turned_queries_of_another_width_are_one_message(tmp_path: Path) -> None:
    directory = edited("eva02-half", tmp_path, "blocks.1.attn", {"qk": 6}, {})
    with pytest.raises(BadInput, match=r"the weights of 'blocks\.1\.attn' are of other widths than its entry"):
        load_checkpoint(directory)


def test_weights_of_no_width_are_one_message(tmp_path: Path) -> None:
    """Of a layer whose rows are others than those of the layer that reads it has columns."""
    name = "layer1.0.conv1.weight"
    weight = load_file(GOLDEN / "seresnet50-both" / "model.safetensors")[name]
    directory = edited("seresnet50-both", tmp_path, "layer1.0", {}, {name: weight[:3].clone()})
    with pytest.raises(BadInput, match=r"model\.safetensors: these weights don't fit.*layer1\.0\.conv"):
        load_checkpoint(directory)
