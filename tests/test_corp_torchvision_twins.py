"""Every convolutional network of torchvision that is read: weights of timm's shapes, images prepared alike."""

from math import floor
from typing import Any

import pytest
import timm
import torch
from torch import nn

from corp_deploy.families.torchvision_convnets import CONVNETS, OTHER_WEIGHTS
from corp_deploy.families.torchvision_names import preprocessing_of, state_from_torchvision, twin_of

torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed, so there are no models of it")

PREPARED = [*((name, twin.weights) for name, twin in CONVNETS.items()), *OTHER_WEIGHTS]


def _regnet_on_meta(params: Any, weights: None, progress: bool, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return torchvision.models.regnet.RegNet(params, **kwargs)


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", CONVNETS)
def test_every_twin_has_weights_of_the_same_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory; torchvision works out on the processor what a RegNet's blocks are."""
    monkeypatch.setattr(torchvision.models.regnet, "_regnet", _regnet_on_meta)
    twin = CONVNETS[name]
    kwargs = {key: value for key, value in twin.kwargs.items() if key != "img_size"}
    with torch.device("cpu" if twin.kind == "regnet" else "meta"):
        theirs = torchvision.models.get_model(name)
    with torch.device("meta"):
        ours = timm.create_model(twin.timm, **kwargs)
    expected = {key: each.shape for key, each in ours.state_dict().items() if not key.endswith("num_batches_tracked")}
    state = state_from_torchvision(theirs.state_dict(), twin, expected, where="w")
    assert {key: each.shape for key, each in state.items() if not key.endswith("num_batches_tracked")} == expected
    norms = {each.eps for each in theirs.modules() if isinstance(each, nn.BatchNorm2d)}
    assert {each.eps for each in ours.modules() if isinstance(each, nn.BatchNorm2d)} == norms


@pytest.mark.parametrize(("name", "weights"), PREPARED)
def test_images_are_prepared_as_torchvision_does(name: str, weights: str) -> None:
    theirs = torchvision.models.get_model_weights(name)[weights].transforms()
    twin = twin_of(f"torchvision:{name}.{weights}")
    ours = preprocessing_of(twin, None)
    assert (ours.mean, ours.std) == (tuple(theirs.mean), tuple(theirs.std))
    assert ours.interpolation == theirs.interpolation.value
    assert twin.kwargs["img_size"] == theirs.crop_size[0]
    assert floor(theirs.crop_size[0] / (ours.crop_pct or 1.0)) == theirs.resize_size[0], "as timm computes it"


def test_all_weights_of_torchvision_are_known() -> None:
    for name in CONVNETS:
        assert {each for of, each in PREPARED if of == name} == {
            each.name for each in torchvision.models.get_model_weights(name)
        }
