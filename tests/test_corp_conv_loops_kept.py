"""What both closed loops keep of networks of convolutions, beside the open loop."""

import copy

import pytest
import torch
from torch import nn

from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import PRESETS
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from tests.small_convnets import SMALL, checkpoint, conv_sites, error, images_of, method, pairs_of, pixels

WITH_CONVOLUTIONS = tuple(name for name, method in PRESETS.items() if method.conv_recovery != "keep")


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["resnet18", "resnet26t", "seresnet50", "resnext50_32x4d", "small_efficientnet"])
def test_nothing_removed_is_the_identity(name: str) -> None:
    model, source = checkpoint(name).model, images_of(name, 16)
    assert error(reduce_closed_loop(model, source, method("best", 0.0)).model, model, pixels(6)) < 1e-4
    assert error(reduce_symmetric_loop(model, source, method("best", 0.0)).model, model, pixels(6)) < 1e-4


@torch.no_grad()
def with_duplicates(model: nn.Module) -> nn.Module:
    """Every two neighbours between convolutions alike."""
    twice = copy.deepcopy(model)
    for site in conv_sites(twice):
        for between in site.between:
            by_channel: list[nn.Conv2d | nn.Linear] = [site.convolution(between.writer)]
            for name in between.along:
                squeezed = name in site.squeezes(between)
                by_channel.append(site.squeeze(name).expand if squeezed else site.convolution(name))
            for layer in by_channel:
                assert layer.bias is not None
                layer.weight[1::2], layer.bias[1::2] = layer.weight[::2], layer.bias[::2]
    return twice


# RegNets with squeezes want more images than are quick: fits to fewer means than channels are no plain duplicates.
@pytest.mark.slow("models")
@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("regnety_002", "regnetz_005")])
def test_planted_duplicates_go_at_no_loss(name: str) -> None:
    """There are more positions than columns everywhere; without a ridge to speak of."""
    dense, source, unseen = with_duplicates(checkpoint(name).model), images_of(name, 96), pixels(6, seed=5)
    for loop in (reduce_closed_loop, reduce_symmetric_loop):
        reduced = loop(dense, source, method("best", 0.5, ridge_rel=1e-8)).model
        assert error(reduced, dense, unseen) < 1e-5
        for narrow, site in pairs_of(reduced, dense):
            assert all(a < b for a, b in zip(narrow.width.channels, site.width.channels, strict=True))


@pytest.mark.slow("models")
@pytest.mark.parametrize("preset", WITH_CONVOLUTIONS)
def test_every_method_walks_in_both_loops(preset: str) -> None:
    for name in ("resnet50", "resnext50_32x4d"):
        model, source = checkpoint(name).model, images_of(name, 16)
        for loop in (reduce_closed_loop, reduce_symmetric_loop):
            reduced = loop(model, source, method(preset, 0.5)).model
            assert error(reduced, model, pixels(6)) < 1.0
            assert not any(each._forward_pre_hooks or each._forward_hooks for each in reduced.modules())
