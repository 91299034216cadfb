"""Coupled channels of residual streams: who writes and reads them, elimination over all readers, and the reduction."""

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from calib.moments import Moments
from calib.patch_moments import PatchMoments
from corp_deploy.algebra.coupled import eliminate_coupled
from corp_deploy.cli import main
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


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


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


def greedy(
    covariances: list[Tensor], weights: list[Tensor], ridge_rel: float, taps: list[int], parts: list[int]
) -> tuple[list[int], list[float]]:
    """Every candidate solved anew at every step; errors against all the channels, as shares of each reader's. In turns
    one of every part.
    """
    left, order, errors = list(range(len(parts))), list[int](), list[float]()

    def lost(channels: list[int]) -> float:
        total = 0.0
        for covariance, weight, size in zip(covariances, weights, taps, strict=True):
            kept = [channel * size + place for channel in channels for place in range(size)]
            shifted = covariance + ridge_rel * covariance.diagonal().mean() * torch.eye(len(covariance)).double()
            best = torch.zeros_like(weight)
            if kept:
                best[:, kept] = torch.linalg.solve(shifted[kept][:, kept], shifted[kept] @ weight.T).T
            change = weight - best
            total += float(((change @ shifted) * change).sum() / ((weight @ covariance) * weight).sum())
        return total

    count = len(set(parts))
    while left:
        turn = order[len(order) // count * count :]
        offered = [out for out in left if parts[out] not in [parts[each] for each in turn]]
        costs = [lost([each for each in left if each != out]) for out in offered]
        errors.append(min(costs))
        order.append(offered[costs.index(min(costs))])
        left.remove(order[-1])
    return order, errors


@pytest.mark.parametrize(
    ("seed", "taps", "parts"),
    [
        (0, [1, 1, 1], [0] * 9),
        (1, [1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (2, [2, 1, 2], [0] * 9),
        (3, [3, 1, 2], [0, 1, 2] * 3),
    ],
)
def test_elimination_is_greedy_over_all_readers(seed: int, taps: list[int], parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixings = [drawn(9 * size, 9 * size) for size in taps]
    covariances = [mixing @ mixing.T for mixing in mixings]
    weights = [drawn(rows, 9 * size) for rows, size in zip((4, 7, 2), taps, strict=True)]
    order, errors = greedy(covariances, weights, 1e-6, taps, parts)
    eliminated = eliminate_coupled(covariances, weights, ridge_rel=1e-6, taps=taps, part_C=torch.tensor(parts))
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


@pytest.mark.slow("models")
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


def test_readers_that_nothing_reaches_have_no_say() -> None:
    covariance = torch.eye(4, dtype=torch.float64)
    weight = torch.diag(torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64))
    silent = torch.zeros(4, 4, dtype=torch.float64)
    both = eliminate_coupled([silent, covariance], [weight.flip(0), weight], ridge_rel=1e-4)
    assert both.order_F.tolist() == [1, 2, 0, 3]
    nothing = eliminate_coupled([silent], [weight], ridge_rel=1e-4)
    assert nothing.order_F.tolist() == [0, 1, 2, 3]
    assert float(nothing.error_F.abs().max()) == 0.0


@pytest.mark.parametrize("selection", ["active", "wanda", "producer-l2", "variance"])
def test_other_rankings_keep_what_a_loop_over_the_readers_keeps(selection: str) -> None:
    own = checkpoint("resnet18")
    how = method_from_preset("none", residual_sparsity=0.5, align_conv=8, conv_selection=selection)
    stream = streams(own.model)["conv1"]
    score_C = torch.zeros(stream.width, dtype=torch.float64)
    for path, reader in stream.readers.items():
        taken = moments("resnet18").sites[path]
        assert isinstance(taken, PatchMoments)
        second_CC, mean_C = taken.map_second_GCC[0], taken.map_mean_GC[0]
        weight_C = reader.weight.double().abs().sum(dim=(0, 2, 3))
        own_C = {
            "active": taken.active_GC[0] / taken.map_tokens,
            "wanda": weight_C * second_CC.diagonal().sqrt(),
            "variance": second_CC.diagonal() - mean_C.square(),
            "producer-l2": torch.zeros(stream.width, dtype=torch.float64),
        }[selection]
        score_C += own_C / own_C.sum() if selection != "producer-l2" else own_C
    if selection == "producer-l2":
        rows = [writer.weight.double().flatten(1).square().sum(dim=1) for writer in stream.writers.values()]
        score_C = torch.stack(rows).sum(dim=0)
    kept = set(score_C.argsort(descending=True)[: stream.width // 2].tolist())
    new = reduced_stream(stream, moments("resnet18"), how, stream.width // 2, torch.device("cpu"))
    assert set(new.kept["conv1"].tolist()) == kept


@pytest.mark.slow("models")
def test_streams_alone_are_reduced_by_command(tmp_path: Path) -> None:
    own = checkpoint("resnet18")
    save(own, tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(48).numpy())
    dense, taken = ("--model", tmp_path / "dense"), ("--moments", tmp_path / "moments.safetensors")
    calibrated = run("calibrate", *dense, "--images", tmp_path / "images.npy", "--residual", "-o", taken[1])
    assert calibrated.exit_code == 0, calibrated.output
    said = run("reduce", *dense, *taken, "--residual", 0.5, "--align", "conv=8", "-o", tmp_path / "reduced")
    assert said.exit_code == 0, said.output
    assert "4 of 4 sites reduced" in said.output
    assert macs(load_checkpoint(tmp_path / "reduced").model) < 0.75 * macs(own.model)
    nothing = run("reduce", *dense, *taken, "--residual", 0.01, "-o", tmp_path / "none")
    assert nothing.exit_code == 2
    assert "nothing would be removed, 0 of 4 sites reduced: widths are rounded to multiples" in nothing.output
    assert not (tmp_path / "none").exists()


def test_streams_that_are_none_are_refused(tmp_path: Path) -> None:
    """Of a model that gives its stages' maps, whose channels are what it is for."""
    save(checkpoint("resnet18"), tmp_path / "dense")
    np.save(tmp_path / "images.npy", pixels(8).numpy())
    words = ("--model", tmp_path / "dense", "--outputs", "layer1_map,map", "--images", tmp_path / "images.npy")
    said = run("calibrate", *words, "--residual", "-o", tmp_path / "moments.safetensors")
    assert said.exit_code == 2
    assert "--residual: no stream of this model" in said.output
    assert not (tmp_path / "moments.safetensors").exists()


@pytest.mark.parametrize(
    ("site", "entry", "said"),
    [
        ("layer1.0", {"channels": [999]}, r"layer1.0: channels \[999\], which \[64\] can't become"),
        ("layer1.0", {"channels": [8, 8]}, r"layer1.0: channels \[8, 8\], which \[64\] can't become"),
        ("conv1", {"coupled": 1_000_000}, "conv1: 1000000 channels of a stream of 64"),
        ("conv1", {"coupled": 65}, "conv1: 65 channels of a stream of 64"),
    ],
)
def test_edited_widths_are_one_message(site: str, entry: dict[str, object], said: str, tmp_path: Path) -> None:
    save(checkpoint("resnet18"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sites"][site] = entry
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=said):
        load_checkpoint(tmp_path)
    assert run("inspect", "--model", tmp_path).exit_code == 2
