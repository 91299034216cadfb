"""torchvision's convolutional networks, read as timm's: the same outputs, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from corp_deploy.families.family import image_spec
from corp_deploy.families.modules import counts_of_batches
from corp_deploy.families.timm_library import names_of_weights
from corp_deploy.families.torchvision_names import state_from_torchvision, twin_of
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests.small_convnets import conv_sites

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed, so there are no models of it")

BLOCKS = {"resnet18": 8, "regnet_y_400mf": 16, "mobilenet_v2": 16, "mobilenet_v3_small": 10}
"""How many have convolutions that feed others."""


@torch.no_grad()
def lively(name: str) -> Any:
    """With norms whose statistics are those of images."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=7)
    for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
        norm.momentum = None
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(std=0.2)
    model.train()(torch.randn(4, 3, 64, 64))
    return model.eval()


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_model_is_torchvisions(name: str, tmp_path: Path) -> None:
    """Whatever the order of the weights in their file; to rounding in float64, where norms' eps would show."""
    theirs, text = lively(name), f"torchvision:{name}"
    # Its older files have no counts of batches.
    state = {key: each for key, each in theirs.state_dict().items() if "num_batches" not in key}
    save_file(state, tmp_path / "w.safetensors")
    taken = load_dense(text, weights=tmp_path / "w.safetensors", kwargs={"img_size": 64})
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    model = taken.model
    with torch.inference_mode():
        torch.testing.assert_close(model(images.float()), theirs(images.float()), rtol=1e-3, atol=1e-4)
    assert image_spec(model).shape == (3, 64, 64)
    assert any("images prepared as torchvision does for IMAGENET1K_V1" in note for note in taken.notes)
    assert len(conv_sites(model)) >= BLOCKS[name]
    state = state_from_torchvision(theirs.double().state_dict(), twin_of(text), names_of_weights(model), where="w")
    model.double().load_state_dict({**counts_of_batches(model), **state})
    with torch.inference_mode():
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet50", "regnet_y_400mf", "efficientnet_b0"])
def test_weights_of_another_model_are_refused(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        state = torchvision.models.mobilenet_v2(num_classes=7).state_dict()
    save_file({key: torch.zeros(each.shape) for key, each in state.items()}, tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match="no names of torchvision's weights"):
        load_dense(f"torchvision:{name}", weights=tmp_path / "w.safetensors", kwargs={"img_size": 64})


def test_torchvisions_weights_under_timms_name_are_told_apart(tmp_path: Path) -> None:
    with torch.device("meta"):
        state = torchvision.models.mobilenet_v2(num_classes=7).state_dict()
    save_file({key: torch.zeros(each.shape) for key, each in state.items()}, tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match=r"names of torchvision's convolutional networks.*--model torchvision:"):
        load_dense("mobilenetv2_100", weights=tmp_path / "w.safetensors", kwargs={})
