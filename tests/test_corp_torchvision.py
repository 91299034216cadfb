"""torchvision's classifiers: the same outputs, images prepared alike, classes and sizes as the weights say."""

from math import floor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from corp_deploy.families.family import image_spec, sites_of
from corp_deploy.families.torchvision_models import architecture_of_classifier
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests.refusals import rejects

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed, so there are no models of it")

BLOCKS = {"resnet18": 8, "mobilenet_v3_small": 10, "shufflenet_v2_x0_5": 16}
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
def test_model_equals_torchvisions(name: str, tmp_path: Path) -> None:
    """Whatever the order of the weights in their file, of as many classes as they tell apart."""
    theirs = lively(name)
    # Its older files have no counts of batches.
    state = {key: each for key, each in theirs.state_dict().items() if "num_batches" not in key}
    save_file(state, tmp_path / "w.safetensors")
    taken = load_dense(f"torchvision:{name}", weights=tmp_path / "w.safetensors", kwargs={"img_size": 64})
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(taken.model(images), theirs(images))
    assert image_spec(taken.model).shape == (3, 64, 64)
    assert any("images prepared as torchvision does" in note for note in taken.notes)
    assert len(sites_of(taken.model).every) >= BLOCKS[name]


def test_preprocessing_equals_torchvisions() -> None:
    """For every set of weights; without a name for the first."""
    library = torchvision.models
    for name in library.list_models(module=library):
        entries = library.get_model_weights(name)
        for weights, entry in (("", next(iter(entries))), *((f".{each.name}", each) for each in entries)):
            theirs, asked = (
                entry.transforms(),
                architecture_of_classifier(f"torchvision:{name}{weights}", {}, Preprocessing()),
            )
            ours = asked.preprocessing
            assert (ours.mean, ours.std) == (tuple(theirs.mean), tuple(theirs.std))
            assert ours.interpolation == theirs.interpolation.value
            assert asked.kwargs["img_size"] == theirs.crop_size[0]
            assert floor(theirs.crop_size[0] / (ours.crop_pct or 1.0)) == theirs.resize_size[0], "as timm computes it"


def test_vit_input_size_follows_its_positions() -> None:
    """Weights of SWAG are told by it, whose images are resized to the crop's size."""
    positions, patches = torch.empty(1, 24 * 24 + 1, 768), torch.empty(768, 3, 16, 16)
    state = {"encoder.pos_embedding": positions, "conv_proj.weight": patches, "heads.head.weight": torch.empty(5, 768)}
    asked = architecture_of_classifier("torchvision:vit_b_16", {}, Preprocessing(), state)
    assert asked.kwargs == {"image_size": 384, "img_size": 384, "num_classes": 5}
    assert (asked.preprocessing.crop_pct, asked.preprocessing.interpolation) == (1.0, "bicubic")
    assert architecture_of_classifier("torchvision:vit_b_16", {}, Preprocessing()).kwargs["image_size"] == 224
    sized = architecture_of_classifier("torchvision:vit_b_16", {"img_size": 288}, Preprocessing())
    assert (sized.kwargs["image_size"], sized.kwargs["img_size"]) == (288, 288)
    with pytest.raises(BadInput, match="positions for images of 384x384, --model-kwargs ask for img_size 224"):
        architecture_of_classifier("torchvision:vit_b_16", {"img_size": 224}, Preprocessing(), state)


def test_unknown_models_and_weights_are_refused(tmp_path: Path) -> None:
    rejects("alexnet needs --weights", load_dense, "torchvision:alexnet", weights=None, kwargs={})
    with pytest.raises(BadInput, match=r"expected one of resnet50\.IMAGENET1K_V1, resnet50\.IMAGENET1K_V2"):
        load_dense("torchvision:resnet50.IMAGENET1K_V3", weights=None, kwargs={})
    with torch.device("meta"):
        state = torchvision.models.mobilenet_v2(num_classes=7).state_dict()
    save_file({key: torch.zeros(each.shape) for key, each in state.items()}, tmp_path / "w.safetensors")
    with pytest.raises(BadInput, match=r"w\.safetensors"):
        load_dense("torchvision:resnet18", weights=tmp_path / "w.safetensors", kwargs={"img_size": 64})
    with pytest.raises(BadInput, match=r"names of torchvision's convolutional networks.*--model torchvision:"):
        load_dense("mobilenetv2_100", weights=tmp_path / "w.safetensors", kwargs={})
