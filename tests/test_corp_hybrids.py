"""timm's hybrids: the ResNets in front of a transformer's tokens as rows of convolutions, and closed loops behind."""

import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import GroupNormAct
from timm.layers.std_conv import StdConv2dSame
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import resnet26d
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer_hybrid import _cfg, _create_vision_transformer_hybrid
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from calib.moments import Moments
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.family import sites_of, timm_family_of
from corp_deploy.families.model_cost import macs
from corp_deploy.families.site_cost import site_costs
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.conv_channels import elimination
from corp_deploy.reduction.conv_modules import reading_of
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.row_moments import row_moments
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint, save
from corp_deploy.store.dense_model import load_dense
from ground.errors import BadInput
from tests.small_convnets import error, opened, pixels

SIZE = 64
NAMES = ("small_hybrid", "small_hybrid_v2")
ROWS = {
    "small_hybrid": ["conv1", "layer1.0", "layer2.0", "layer3.0"],
    "small_hybrid_v2": ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1", "stages.2.blocks.0"],
}
VIT: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 1}
default_cfgs = generate_default_cfgs({f"{name}.untrained": _cfg(input_size=(3, SIZE, SIZE)) for name in NAMES})


@register_model
def small_hybrid(**kwargs: Any) -> nn.Module:
    """Behind three stages of a ResNet with a deep stem."""
    stages = {"layers": [1, 1, 1, 1], "channels": [16, 24, 32, 40], "stem_width": 8}
    backbone = resnet26d(features_only=True, out_indices=[3], **stages)
    model: nn.Module = _create_vision_transformer_hybrid("small_hybrid", backbone=backbone, **{**VIT, **kwargs})
    return model


@register_model
def small_hybrid_v2(**kwargs: Any) -> nn.Module:
    """Behind three stages of a ResNetV2 whose norms have groups of 2, 3 and 4 of the inner channels."""
    backbone = ResNetV2(
        layers=[1, 2, 1],
        channels=(64, 96, 128),
        stem_chs=16,
        num_classes=0,
        global_pool="",
        preact=False,
        stem_type="same",
        conv_layer=partial(StdConv2dSame, eps=1e-8),
        norm_layer=partial(GroupNormAct, num_groups=8),
    )
    model: nn.Module = _create_vision_transformer_hybrid("small_hybrid_v2", backbone=backbone, **{**VIT, **kwargs})
    return model


@cache
def library(name: str) -> nn.Module:
    """timm's own, its norms' statistics those of images."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=7, img_size=SIZE)
    with torch.no_grad():
        for norm_name, norm in model.named_modules():
            if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm) and "backbone" in norm_name:
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(std=0.3)
            if isinstance(norm, nn.BatchNorm2d):
                norm.momentum = None
        model.train()(pixels(64, seed=9, size=SIZE))
    return model.eval().requires_grad_(False)


@cache
def checkpoint(name: str) -> Checkpoint:
    architecture = Architecture(name=name, kwargs={"num_classes": 7, "img_size": SIZE})
    model = dense_from_architecture(architecture)
    model.load_state_dict(timm_family_of(model).own_state(model, library(name).state_dict()))
    return Checkpoint(model=model.eval().requires_grad_(False), architecture=architecture, lineage={})


@cache
def moments(name: str) -> Moments:
    own = checkpoint(name)
    with TemporaryDirectory() as folder:
        return calibrate(own, opened(own.model, 48, Path(folder), size=SIZE), batch_size=24)


def method(**changes: Any) -> Method:
    return method_from_preset("best", align_conv=8, align_hidden=8, align_head=8, **changes)


def rows_of(model: nn.Module) -> list[ConvSite]:
    return [site for site in sites_of(model).every if isinstance(site, ConvSite)]


@pytest.mark.parametrize("name", NAMES)
def test_folded_norms_are_the_same_function(name: str) -> None:
    theirs, model = copy.deepcopy(library(name)).double(), copy.deepcopy(checkpoint(name).model).double()
    model.load_state_dict(timm_family_of(model).own_state(model, theirs.state_dict()))
    assert error(model, theirs, pixels(3, size=SIZE).double()) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_front_of_the_tokens_are_sites_and_cost_what_is_counted(name: str) -> None:
    model = checkpoint(name).model
    assert [site.name for site in rows_of(model)] == [f"patch_embed.backbone.{row}" for row in ROWS[name]]
    assert len(sites_of(model).linear) == 4
    assert not sites_of(model).refused
    site_costs(model, "macs")
    site_costs(model, "params")
    # Its counter does not know the fused attention of every torch on the CPU.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(pixels(1, size=SIZE))
    assert counter.get_total_flops() == 2 * macs(model)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_removed_is_the_identity(name: str) -> None:
    own = checkpoint(name)
    asked = method(conv_sparsity=0.0, mlp_sparsity=0.0, attention_sparsity=0.0)
    assert error(reduce(own.model, moments(name), asked).model, own.model, pixels(3, size=SIZE)) < 1e-5


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_reduced_written_and_read_again(name: str, tmp_path: Path) -> None:
    own = checkpoint(name)
    reduction = reduce(own.model, moments(name), method(conv_sparsity=0.5, mlp_sparsity=0.5))
    costs = site_costs(own.model, "macs")
    for site, dense in zip(rows_of(reduction.model), rows_of(own.model), strict=True):
        assert all(kept < whole for kept, whole in zip(site.width.channels, dense.width.channels, strict=True))
        assert costs.of(dense, site.width, "ragged") == site_costs(reduction.model, "macs").now[site.name]
    save(replace(own, model=reduction.model), tmp_path / "model")
    again = load_checkpoint(tmp_path / "model").model
    assert error(again, reduction.model, pixels(2, size=SIZE)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_loop_reduces_what_stands_behind_the_tokens(name: str, tmp_path: Path) -> None:
    own = checkpoint(name)
    images = opened(own.model, 48, tmp_path, size=SIZE)
    reduction = reduce_closed_loop(own.model, images, method(mlp_sparsity=0.5, attention_sparsity=0.5))
    assert [each.site for each in reduction.sites if "backbone" in each.site] == []
    assert error(reduction.model, own.model, pixels(48, size=SIZE)) < 0.3
    with pytest.raises(BadInput, match=r"patch_embed\.backbone\.\w+.* in front of the blocks"):
        reduce_closed_loop(own.model, images, method(conv_sparsity=0.5))


@pytest.mark.parametrize("name", NAMES)
def test_weights_under_timms_names_are_read(name: str, tmp_path: Path) -> None:
    save_file(library(name).state_dict(), tmp_path / "weights.safetensors")
    own = load_dense(name, weights=tmp_path / "weights.safetensors", kwargs={"img_size": SIZE})
    assert error(own.model, library(name), pixels(2, size=SIZE)) < 1e-5


def _heard(model: nn.Module, layer: str, images: Tensor) -> Tensor:
    heard: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda _, __, out: heard.append(out))
    with torch.inference_mode():
        model(images)
    handle.remove()
    return heard[0]


def _kept(site: ConvSite, dense: ConvSite) -> list[int]:
    """The channels of the first place, by the dense rows that write them."""
    weight, whole = (each.convolution("conv1").weight for each in (site, dense))
    return [int((whole == row).flatten(1).all(dim=1).nonzero()) for row in weight]


@pytest.mark.parametrize("preset", ["best", "none"])
def test_groups_of_norms_stay_whole_or_go(preset: str) -> None:
    """By elimination and by scores; the norm of those that stay gives what it gave."""
    own = checkpoint("small_hybrid_v2")
    asked = method_from_preset(preset, align_conv=8, conv_sparsity=0.5)
    reduced = reduce(own.model, moments("small_hybrid_v2"), asked).model
    pairs = list(zip(rows_of(reduced), rows_of(own.model), strict=True))
    for site, dense in pairs:
        kept, unit = _kept(site, dense), dense.width.channels[0] // 8
        assert [channel // unit for channel in kept[::unit]] == [channel // unit for channel in kept[unit - 1 :: unit]]
        assert len(kept) == site.width.channels[0] < dense.width.channels[0]
    name, images = f"{pairs[0][0].name}.norm1", pixels(3, size=SIZE)
    now, before = (_heard(each, name, images) for each in (reduced, own.model))
    assert torch.allclose(now, before[:, _kept(*pairs[0])], atol=1e-5)


def test_eliminations_of_units_say_what_is_lost() -> None:
    """What an elimination of units says is lost, computed anew at every width."""
    own = checkpoint("small_hybrid_v2")
    site = rows_of(own.model)[0]
    reading = reading_of(site, 1)
    patches = row_moments(site, moments("small_hybrid_v2"), torch.device("cpu")).patches[site.between[1].reader]
    order = elimination(patches, reading, method())
    covariance_UU = patches.covariance_GUU[0]
    shifted_UU = covariance_UU + order.ridge * torch.eye(len(covariance_UU), dtype=torch.float64)
    weight_PU = reading.weight_GPU[0]
    for width in range(reading.unit, reading.channels, reading.unit):
        kept_K = order.kept(width)
        cross_PK = weight_PU @ shifted_UU[:, kept_K]
        new_PU = torch.zeros_like(weight_PU)
        new_PU[:, kept_K] = torch.linalg.solve(shifted_UU[kept_K][:, kept_K], cross_PK.T).T
        change_PU = weight_PU - new_PU
        assert order.error_at(width) == pytest.approx(float((change_PU @ shifted_UU * change_PU).sum()), rel=1e-6)
