"""Coupled channels of residual streams: who writes and reads them, elimination over all readers, and the reduction."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor, nn

from calib.moments import Moments
from corp_deploy.algebra.coupled import eliminate_coupled
from corp_deploy.families.convolution import Convolution
from corp_deploy.families.coupled_site import CoupledSite
from corp_deploy.families.family import sites_of
from corp_deploy.families.model_cost import macs
from corp_deploy.families.modules import replaced
from corp_deploy.families.site_cost import site_costs
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.coupled_channels import reduced_stream
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import load_checkpoint, save
from ground.errors import BadInput
from tests.small_convnets import SMALL, checkpoint, error, opened, outputs, pixels

FEW = ["resnet18", "resnet50d", "seresnet50", "small_efficientnet"]


@cache
def moments(name: str) -> Moments:
    own = checkpoint(name)
    with TemporaryDirectory() as folder:
        return calibrate(own, opened(own.model, 64, Path(folder)), batch_size=32, statistics=Statistics(residual=True))


def method(preset: str, share: float) -> Method:
    return method_from_preset(preset, residual_sparsity=share, align_conv=8)


def streams(model: nn.Module) -> dict[str, CoupledSite]:
    return {site.name: site for site in sites_of(model).coupled}


@pytest.mark.parametrize("name", list(SMALL))
def test_silent_channels_of_a_stream_are_silent_everywhere(name: str) -> None:
    """Without a channel in its writers' rows and bias, no reader's column of it matters: the walk forgot nobody."""
    for stream in streams(checkpoint(name).model).values():
        model = copy.deepcopy(checkpoint(name).model)
        own = streams(model)[stream.name]
        for writer in (*own.writers.values(), *own.along.values()):
            if isinstance(writer, Convolution):
                assert writer.bias is not None
                writer.weight[:4], writer.bias[:4] = 0.0, 0.0
        before = outputs(model, pixels(2))
        for reader in own.readers.values():
            reader.weight[:, :4] = 7.0
        assert torch.allclose(outputs(model, pixels(2)), before)


def test_resnet_18s_stream_is_that_of_the_stem() -> None:
    model = checkpoint("resnet18").model
    assert {name: list(site.readers) for name, site in streams(model).items()} == {
        "conv1": ["layer1.0.conv1", "layer2.0.conv1", "layer2.0.downsample.0"],
        "layer2.0.downsample.0": ["layer3.0.conv1", "layer3.0.downsample.0"],
        "layer3.0.downsample.0": ["layer3.1.conv1", "layer4.0.conv1", "layer4.0.downsample.0"],
        "layer4.0.downsample.0": ["fc"],
    }
    assert list(streams(model)["layer3.0.downsample.0"].writers) == [
        "layer3.0.downsample.0",
        "layer3.0.conv2",
        "layer3.1.conv2",
    ]


def greedy(covariances: list[Tensor], weights: list[Tensor], ridge_rel: float) -> tuple[list[int], list[float]]:
    """Every candidate solved anew at every step; errors against all the channels, as shares of each reader's."""
    left, order, errors = list(range(len(covariances[0]))), list[int](), list[float]()

    def lost(kept: list[int]) -> float:
        total = 0.0
        for covariance, weight in zip(covariances, weights, strict=True):
            shifted = covariance + ridge_rel * covariance.diagonal().mean() * torch.eye(len(covariance)).double()
            best = torch.zeros_like(weight)
            if kept:
                best[:, kept] = torch.linalg.solve(shifted[kept][:, kept], shifted[kept] @ weight.T).T
            change = weight - best
            total += float(((change @ shifted) * change).sum() / ((weight @ covariance) * weight).sum())
        return total

    while left:
        costs = [lost([each for each in left if each != out]) for out in left]
        errors.append(min(costs))
        order.append(left.pop(costs.index(min(costs))))
    return order, errors


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_elimination_is_greedy_over_all_readers(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixings = [drawn(9, 9) for _ in range(3)]
    covariances = [mixing @ mixing.T for mixing in mixings]
    weights = [drawn(rows, 9) for rows in (4, 7, 2)]
    order, errors = greedy(covariances, weights, 1e-6)
    eliminated = eliminate_coupled(covariances, weights, ridge_rel=1e-6)
    assert eliminated.order_F.tolist() == order
    assert torch.allclose(eliminated.error_F, torch.tensor(errors, dtype=torch.float64), rtol=1e-6)


def test_a_channel_that_others_are_made_of_goes_first() -> None:
    """Of singular statistics: the copy costs nothing where every reader sees it as one."""
    base = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_NC = torch.cat([base, 2.0 * base[:, :2]], dim=1)
    weights = [torch.randn(3, 8, generator=torch.Generator().manual_seed(each)).double() for each in (1, 2)]
    covariance = torch.cov(x_NC.T, correction=0)
    eliminated = eliminate_coupled([covariance, 3.0 * covariance], weights, ridge_rel=1e-9)
    assert float(eliminated.error_F[1]) < 1e-6 < 1e-3 < float(eliminated.error_F[2])


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("preset", ["best", "grail", "corp", "vbp", "none"])
def test_narrower_streams(name: str, preset: str, tmp_path: Path) -> None:
    own = checkpoint(name)
    reduction = reduce(own.model, moments(name), method(preset, 0.5))
    narrower, dense = streams(reduction.model), streams(own.model)
    assert all(narrower[each].width < site.width for each, site in dense.items() if site.width >= 16)
    assert macs(reduction.model) < 0.75 * macs(own.model)
    site_costs(reduction.model, "macs")
    save(replace(own, model=reduction.model), tmp_path / "model")
    again = load_checkpoint(tmp_path / "model").model
    assert torch.equal(outputs(again, pixels(2)), outputs(reduction.model, pixels(2)))


@pytest.mark.parametrize("name", FEW)
def test_repair_helps_the_readers(name: str) -> None:
    own = checkpoint(name)
    lost = {}
    for preset in ("none", "grail", "best"):
        reports = reduce(own.model, moments(name), method(preset, 0.5)).sites
        lost[preset] = sum(report.error / report.energy for report in reports)
    assert lost["best"] < lost["grail"] < lost["none"]


@pytest.mark.parametrize("name", FEW)
def test_both_levers_at_once(name: str) -> None:
    own = checkpoint(name)
    both = replace(method("best", 0.5), conv_sparsity=0.5)
    reduction = reduce(own.model, moments(name), both)
    assert macs(reduction.model) < 0.5 * macs(own.model)
    assert reduction.coverage.reduced


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("preset", ["best", "grail"])
def test_planted_copies_of_a_streams_channels_are_removed_at_no_loss(name: str, preset: str) -> None:
    """Channels 0 to 7 written twice, at half their size; the dense channels that repeat are found and taken off."""
    own = checkpoint(name)
    model = copy.deepcopy(own.model)
    stream = max(streams(model).values(), key=lambda site: site.width)
    first, copies = slice(0, stream.width // 2), slice(stream.width // 2, stream.width // 2 * 2)
    for each in (*stream.writers.values(), *stream.along.values()):
        if isinstance(each, Convolution):
            assert each.bias is not None
            each.weight[copies], each.bias[copies] = each.weight[first], each.bias[first]
        else:
            assert each.expand.bias is not None
            each.expand.weight[copies], each.expand.bias[copies] = each.expand.weight[first], each.expand.bias[first]
    planted = replace(own, model=model)
    with TemporaryDirectory() as folder:
        taken = calibrate(planted, opened(model, 32, Path(folder)), batch_size=32, statistics=Statistics(residual=True))
    tight = replace(method(preset, 0.5), ridge_rel=1e-10)
    if preset == "grail":  # whose ranking has no reason to take one of each pair
        tight = replace(tight, conv_selection="obs")
    new = reduced_stream(stream, taken, tight, stream.width // 2, torch.device("cpu"))
    reduced = replaced(model, new.modules)
    assert all(report.error < 1e-5 * report.energy for report in new.reports)
    assert error(reduced, model, pixels(4)) < 1e-4


def test_moments_without_streams_are_refused() -> None:
    own = checkpoint("resnet18")
    with TemporaryDirectory() as folder:
        without = calibrate(own, opened(own.model, 8, Path(folder)), batch_size=8)
    with pytest.raises(BadInput, match=r"layer1\.0\.conv1: .*calibrate again with --residual"):
        reduce(own.model, without, method("best", 0.5))
