"""Directories of version 0.1 whose networks had their norms taken into convolutions: they say what they said then."""

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
    """Blocks with squeezes and narrower streams, a site of which a constant is left, a norm over the image, and an
    attention with narrower queries; what is written of it today as well.
    """
    checkpoint = load_checkpoint(GOLDEN / name)
    expected = np.array(json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8")))
    np.testing.assert_allclose(answers(checkpoint.model), expected, rtol=1e-4, atol=1e-5)
    save(checkpoint, tmp_path)
    again = load_checkpoint(tmp_path).model
    torch.testing.assert_close(answers(again), answers(checkpoint.model), rtol=1e-5, atol=1e-5)


def test_weights_of_no_width_are_one_message(tmp_path: Path) -> None:
    """Of a layer whose rows are others than those of the layer that reads it has columns."""
    shutil.copytree(GOLDEN / "seresnet50-both", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    state = load_file(weights)
    state["layer1.0.conv1.weight"] = state["layer1.0.conv1.weight"][:3].clone()
    save_file(state, weights, metadata={"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    config["weights_sha256"] = sha256_of_file(weights)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BadInput, match=r"model\.safetensors: these weights don't fit.*layer1\.0\.conv"):
        load_checkpoint(tmp_path / "model")
