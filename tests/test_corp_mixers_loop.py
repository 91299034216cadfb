"""Models without attention in a budget and in closed loops, whose stages have other tokens and other channels."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.layers import LayerNorm2d
from timm.models.convnext import ConvNeXt, ConvNeXtBlock
from timm.models.mlp_mixer import MixerBlock
from torch import Tensor, nn

from calib.collect import collect
from calib.moments import Moments
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.model_cost import counted
from corp_deploy.families.site_cost import site_costs
from corp_deploy.families.sites import calibration_taps
from corp_deploy.families.steps import Branch
from corp_deploy.families.timm_pointwise import TokenMlpBlock
from corp_deploy.planning.carry_out import reduce_as_asked
from corp_deploy.planning.request import Budget, ReductionRequest
from corp_deploy.polish.layers import fit_layers_, pairs_of
from corp_deploy.polish.newton import Newton
from corp_deploy.reduction.branch_sums import alignment_sums, channel_sums, dense_advanced
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.streams import Streams
from corp_deploy.reduction.symmetric_loop import reduce_symmetric_loop
from corp_deploy.store.inputs import model_digest, preprocessing_text
from tests.small_models import error, opened, outputs, pixels, small


def multiply_adds(model: nn.Module) -> int:
    """Of one image, by the shapes that convolutions and linear layers give."""
    total = 0

    def count(module: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Linear):
            total += out.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            total += out.numel() * module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]

    counted = copy.deepcopy(model)
    for module in counted.modules():
        module.register_forward_hook(count)
    outputs(counted, pixels(model, 1))
    return total


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["convnext_tiny", "convnextv2_atto", "small_mixer", "small_resmlp"])
def test_a_budget_counts_every_stage_at_its_own_tokens(name: str, tmp_path: Path) -> None:
    checkpoint = small(name)
    model = checkpoint.model
    assert counted(model).macs == multiply_adds(model)
    costs = site_costs(model, "macs")
    for site in sites_of(model).every:
        narrower = {site.name: 8}
        moments = moments_at_random(model)
        reduced = reduce(model, moments, method_from_preset("best", align_hidden=8), widths=narrower).model
        saved = costs.now[site.name] - costs.of(site, 8, "padded")
        assert saved == multiply_adds(model) - multiply_adds(reduced) > 0
    images = opened(model, 24, tmp_path)
    moments = calibrate(checkpoint, images, batch_size=8)
    asked = ReductionRequest(
        preset="best", method=method_from_preset("best", align_hidden=8), budget=Budget(currency="macs", share=0.7)
    )
    reduction, _ = reduce_as_asked(checkpoint, moments, asked, images=images)
    assert 0.6 < multiply_adds(reduction.model) / multiply_adds(model) <= 0.7


def moments_at_random(model: nn.Module) -> Moments:
    images = pixels(model, 8)
    lineage = {"model": model_digest(model), "preprocessing": preprocessing_text(model)}
    return collect(model, calibration_taps(model, sites_of(model)), [images], device="cpu", lineage=lineage)


@pytest.mark.slow("models")
@pytest.mark.parametrize("name", ["convnext_tiny", "convnext_atto", "convnextv2_atto", "small_mixer"])
def test_the_closed_loop_is_nearer_to_the_dense_outputs(name: str, tmp_path: Path) -> None:
    checkpoint = small(name)
    model = checkpoint.model
    images = opened(model, 96, tmp_path)
    moments = calibrate(checkpoint, images, batch_size=8)
    method = method_from_preset("best", mlp_sparsity=0.75, align_hidden=8)
    corp = method_from_preset("corp", mlp_sparsity=0.75, align_hidden=8)
    none = method_from_preset("none", mlp_sparsity=0.75, align_hidden=8)
    looped = reduce_closed_loop(model, images, method)
    assert all(report.loop is not None and report.alignment is not None for report in looped.sites)
    shown, others = pixels(model, 96), pixels(model, 48, seed=9)
    opened_loop = reduce(model, moments, method).model
    for seen in (shown, others):
        best = error(opened_loop, model, seen)
        assert error(looped.model, model, seen) < best
        assert best < min(error(reduce(model, moments, each).model, model, seen) for each in (corp, none))
    symmetric = reduce_symmetric_loop(model, images, method).model
    assert error(symmetric, model, shown) < error(reduce(model, moments, none).model, model, shown)


def apart(model: nn.Module, images: Tensor) -> Streams:
    """Both streams before the first block, the reduced one shifted."""
    family = family_of(model)
    streams = Streams([(family.embedded(model, images), None)])
    for pair in streams:
        pair.reduced = pair.dense + 0.3 * torch.randn(pair.dense.shape, generator=torch.Generator().manual_seed(2))
    return streams


@pytest.mark.parametrize("name", ["convnext_tiny", "convnext_atto", "small_mixer"])
@torch.no_grad()
def test_what_a_closed_loop_sums_is_that_of_the_blocks_own_rows(name: str) -> None:
    """The first block's MLP: over the positions of a map, or over the channels where it mixes tokens."""
    model = small(name).model
    step = next(step for step in family_of(model).steps(model) if isinstance(step, Branch))
    site = sites_of(model).by_name[step.name]
    assert isinstance(site, ChannelSite)
    streams = apart(model, pixels(model, 8))
    aligned = alignment_sums(step, site.first.in_features, streams, None).fit
    x, d, h, t = (list[Tensor]() for _ in range(4))
    for pair in streams:
        if pair.held_out:
            continue
        for reduced_NC, dense_NC in zip(pair.reduced, pair.dense, strict=True):
            before, target, behind = rows_of(model, reduced_NC, dense_NC)
            x, d = [*x, before[0]], [*d, target[0] - before[0]]
            h, t = [*h, before[1]], [*t, behind]
    dense_advanced(step, streams)
    _, lacking = channel_sums(step, site, streams)
    for sums, inputs, targets in ((aligned.on_x, x, d), (lacking.fit, h, t)):
        x_XK, t_XO = torch.cat(inputs).double(), torch.cat(targets).double()
        assert sums.x.tokens == len(x_XK)
        torch.testing.assert_close(sums.x.gram_KK, x_XK.T @ x_XK, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(sums.tx_OK, t_XO.T @ x_XK, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(sums.t_O, t_XO.sum(dim=0), rtol=1e-5, atol=1e-3)


def _entering(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Module, Tensor | None]:
    """The first block by its own modules: what of a stream [N,C] enters its MLP, in its rows; the MLP; the scale."""
    if isinstance(model, ConvNeXt):
        block = model.get_submodule("stages.0.blocks.0")
        assert isinstance(block, ConvNeXtBlock | TokenMlpBlock)
        convolution, norm = block.conv_dw, block.norm

        def positions(x_NC: Tensor) -> Tensor:
            x_1CHW = convolution(x_NC.T.reshape(1, -1, 16, 16))
            if isinstance(norm, LayerNorm2d):
                x_1CHW = norm(x_1CHW)
            x_1HWC = x_1CHW.permute(0, 2, 3, 1)
            normed: Tensor = x_1HWC if isinstance(norm, LayerNorm2d) else norm(x_1HWC)
            return normed.reshape(256, -1)

        return positions, block.mlp, block.gamma
    mixing = model.get_submodule("blocks.0")
    assert isinstance(mixing, MixerBlock)
    return lambda x_NC: mixing.norm1(x_NC).T, mixing.mlp_tokens, None


def rows_of(
    model: nn.Module, reduced_NC: Tensor, dense_NC: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """What enters and leaves the activation in either stream, and what the reduced stream lacks of the dense one behind
    the first block's MLP; a row for each position, or for each channel.
    """
    entering, mlp, scale = _entering(model)
    act, fc1 = mlp.get_submodule("act"), mlp.get_submodule("fc1")
    added = mlp(entering(dense_NC))
    before = dense_NC - reduced_NC
    lacking = before.T + added if scale is None else before + scale * added
    both = [(entering(x_NC), act(fc1(entering(x_NC)))) for x_NC in (reduced_NC, dense_NC)]
    return both[0], both[1], lacking


@pytest.mark.parametrize("name", ["convnext_tiny", "small_mixer"])
def test_layers_are_fitted_in_turn_in_every_stage_and_over_tokens(name: str, tmp_path: Path) -> None:
    checkpoint = small(name)
    model = checkpoint.model
    images = opened(model, 48, tmp_path)
    moments = calibrate(checkpoint, images, batch_size=8)
    reduced = reduce(model, moments, method_from_preset("best", mlp_sparsity=0.75, align_hidden=8)).model
    polished = copy.deepcopy(reduced)
    pairs = pairs_of(model, images.subset(range(36)), images.subset(range(36, 48)))
    reports = fit_layers_(model, polished, pairs, Newton(looks=(2,)), sweeps=1)
    assert [report.part for report in reports] == [site.name for site in sites_of(model).every]
    assert error(polished, model, pixels(model, 48)) < error(reduced, model, pixels(model, 48))
