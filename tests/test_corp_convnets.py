"""timm's convolutional networks: folded norms, sites, costs, steps, and the open loop."""

import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from calib.moments import Moments
from corp_deploy.families.conv_block import conv_blocks
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.family import family_of, sites_of, timm_family_of
from corp_deploy.families.model_cost import macs
from corp_deploy.families.site_cost import site_costs
from corp_deploy.families.steps import Branch, Passage
from corp_deploy.families.widths import ConvWidths
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.method import PRESETS, Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import dense_from_architecture
from tests.small_convnets import SMALL, checkpoint, error, library, opened, pixels

FORMS = tuple(SMALL)
FEW = (
    "resnet18d",
    "resnet50",
    "resnext50_32x4d",
    "seresnet50",
    "regnety_002",
    "small_efficientnetv2",
    "small_mobilenetv3",
)
ONE_CONVOLUTION = {
    "small_efficientnet": {"blocks.0.0"},
    "small_efficientnetv2": {"blocks.0.0"},
    "small_mobilenetv3": {"blocks.0.0", "blocks.2.0"},
}
WITH_CONVOLUTIONS = tuple(name for name, method in PRESETS.items() if method.conv_recovery != "keep")


@cache
def moments(name: str) -> Moments:
    own = checkpoint(name)
    with TemporaryDirectory() as folder:
        return calibrate(own, opened(own.model, 64, Path(folder)), batch_size=32)


def method(preset: str, share: float) -> Method:
    return method_from_preset(preset, conv_sparsity=share, align_conv=8)


def conv_sites(model: nn.Module) -> list[ConvSite]:
    return [site for site in sites_of(model).every if isinstance(site, ConvSite)]


@pytest.mark.parametrize("name", FORMS)
def test_folded_norms_are_the_same_function(name: str) -> None:
    """Exactly, but for the rounding of the model's type."""
    assert error(checkpoint(name).model, library(name), pixels(6)) < 1e-5
    theirs, model = copy.deepcopy(library(name)).double(), copy.deepcopy(checkpoint(name).model).double()
    model.load_state_dict(timm_family_of(model).own_state(model, theirs.state_dict()))
    assert error(model, theirs, pixels(6).double()) < 1e-12


def test_other_norms_would_be_another_function() -> None:
    """That the fold is exact isn't because norms do nothing."""
    state = library("resnet18").state_dict()
    other = {key: torch.ones_like(each) if "running_var" in key else each for key, each in state.items()}
    model = dense_from_architecture(checkpoint("resnet18").architecture)
    model.load_state_dict(timm_family_of(model).own_state(model, other))
    assert error(model, library("resnet18"), pixels(6)) > 1e-2


@pytest.mark.parametrize("name", FORMS)
def test_steps_are_the_model(name: str) -> None:
    model, images = checkpoint(name).model, pixels(3)
    family = family_of(model)
    with torch.inference_mode():
        x_BNC = family.embedded(model, images)
        for step in family.steps(model):
            assert isinstance(step, Branch | Passage)
            x_BNC = step(x_BNC)
        finished = family.finished(model, x_BNC, images)
    assert torch.allclose(finished, model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_every_row_of_several_is_a_site_and_costs_what_is_counted(name: str) -> None:
    """`site_costs` holds its formula against the count; the count is held to PyTorch's own."""
    model = checkpoint(name).model
    assert not sites_of(model).refused
    blocks = {block for block, _ in conv_blocks(model)}
    assert blocks - {site.name for site in conv_sites(model)} == ONE_CONVOLUTION.get(name, set())
    site_costs(model, "macs")
    site_costs(model, "params")
    counter = FlopCounterMode(display=False)
    with counter:
        model(pixels(1))
    assert counter.get_total_flops() == 2 * macs(model)


def test_blocks_of_other_convolutions_stay_as_they_are() -> None:
    """And the blocks around them have sites; the model is the same function, as a whole and in steps."""
    own = checkpoint("small_condconv")
    assert error(own.model, library("small_condconv"), pixels(6)) < 1e-5
    family, images = family_of(own.model), pixels(3)
    with torch.inference_mode():
        x_BNC = family.embedded(own.model, images)
        for step in family.steps(own.model):
            assert isinstance(step, Branch | Passage)
            x_BNC = step(x_BNC)
        finished = family.finished(own.model, x_BNC, images)
    assert torch.allclose(finished, own.model(images), rtol=1e-4, atol=1e-5)
    reasons = {each.name: each.reason for each in sites_of(own.model).refused}
    assert "CondConvResidual" in reasons["blocks.1.0"]
    assert "conv_dw is MixedConv2d" in reasons["blocks.2.0"]
    assert [site.name for site in conv_sites(own.model)] == ["blocks.3.0"]


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", FEW)
def test_costs_at_other_widths_are_those_of_a_model_of_them(name: str) -> None:
    own = checkpoint(name)
    costs = site_costs(own.model, "macs"), site_costs(own.model, "params")
    reduced = reduce(own.model, moments(name), method("none", 0.5)).model
    for site, narrower in zip(conv_sites(own.model), conv_sites(reduced), strict=True):
        assert narrower.width != site.width
        for cost, now in zip(costs, (site_costs(reduced, each) for each in ("macs", "params")), strict=True):
            assert cost.of(site, narrower.width, "padded") == now.now[site.name]


@pytest.mark.parametrize("preset", WITH_CONVOLUTIONS)
def test_nothing_removed_is_the_identity(preset: str) -> None:
    """To float32 rounding; GRAIL's ridge shrinks the layer a little, as published."""
    for name in FEW:
        own = checkpoint(name)
        reduced = reduce(own.model, moments(name), method(preset, 0.0)).model
        limit = 2e-2 if preset == "grail" else 1e-5
        assert error(reduced, own.model, pixels(6)) < limit, name


def _heard(model: nn.Module, layer: nn.Module, images: Tensor) -> Tensor:
    heard: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    with torch.inference_mode():
        model(images)
    handle.remove()
    return heard[0].double()


@pytest.mark.parametrize("name", ["resnet18d", "resnet50"])
def test_one_place_alone_is_least_squares_over_patches(name: str, tmp_path: Path) -> None:
    """The reading convolution on the kept channels against lstsq over every patch of every image, with a bias, and the
    report's error against the outputs themselves.
    """
    own = checkpoint(name)
    taken = calibrate(own, opened(own.model, 24, tmp_path), batch_size=8)
    site = conv_sites(own.model)[2]
    place = len(site.between) - 1 if name == "resnet18d" else 0
    between, dense = site.between[place], site.width.channels
    kept = tuple(8 if at == place else each for at, each in enumerate(dense))
    tight = method_from_preset("best", conv_sparsity=0.5, align_conv=8, ridge_rel=1e-9)
    reduction = reduce(own.model, taken, tight, widths={site.name: ConvWidths(channels=kept)})
    new = next(each for each in conv_sites(reduction.model) if each.name == site.name)
    images = pixels(24)
    reader = new.convolution(between.reader)
    x = _heard(reduction.model, reader, images)
    dense_reader = site.convolution(between.reader)
    target = functional.conv2d(
        _heard(own.model, dense_reader, images),
        dense_reader.weight.double(),
        dense_reader.bias.double(),  # type: ignore[union-attr]
        dense_reader.stride,
        dense_reader.padding,
    )
    u_BUN = functional.unfold(x, reader.kernel_size, padding=reader.padding, stride=reader.stride)  # type: ignore[arg-type]
    u_XU = u_BUN.mT.flatten(0, 1)
    with_one = torch.cat([u_XU, torch.ones(len(u_XU), 1, dtype=torch.float64)], dim=1)
    target_XO = target.flatten(2).mT.flatten(0, 1)
    best = torch.linalg.lstsq(with_one, target_XO, driver="gelsd").solution
    least = float((target_XO - with_one @ best).square().sum(dim=1).mean())
    weight_UO = reader.weight.double().flatten(1).T
    ours = float((target_XO - u_XU @ weight_UO - reader.bias.double()).square().sum(dim=1).mean())  # type: ignore[union-attr]
    report = next(each for each in reduction.sites if each.part == between.writer)
    assert report.error == pytest.approx(ours, rel=1e-4)
    assert least <= ours <= least * 1.001


@pytest.mark.parametrize("name", FEW)
def test_ours_errs_least_in_the_reports(name: str) -> None:
    own = checkpoint(name)
    lost = {}
    for preset in ("none", "grail", "best"):
        reports = reduce(own.model, moments(name), method(preset, 0.5)).sites
        lost[preset] = sum(report.error / report.energy for report in reports)
    assert lost["best"] < lost["grail"] < lost["none"]


@pytest.mark.parametrize("name", FEW)
def test_groups_keep_as_many_each(name: str) -> None:
    own = checkpoint(name)
    reduced = reduce(own.model, moments(name), method("best", 0.5)).model
    for site in conv_sites(reduced):
        for place, width in enumerate(site.width.channels):
            assert width % site.groups(place) == 0
