"""Channels chosen by what they do to the model's outputs."""

from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments, Moments
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning import program_effects
from corp_deploy.planning.curves import site_metrics
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.program_effects import output_metrics
from corp_deploy.planning.request import request_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.moments import site_moments
from corp_deploy.store.checkpoint import Checkpoint

from . import tiny
from .small_convnets import checkpoint as convnet
from .small_convnets import images_of

METHOD = method_from_preset("best", align_hidden=16, align_head=8, mlp_swaps=False)
WEIGHT = "blocks.1.mlp.fc2.weight"
CPU = torch.device("cpu")


def moments_of(folder: Path, dense: Checkpoint, images: int = 24) -> Moments:
    return calibrate(dense, tiny.opened(folder / "images.npy", tiny.images(images), dense.model), batch_size=8)


def gradients_of_every_output(dense: nn.Module, name: str, pixels: Tensor, dim: int) -> Tensor:
    """Of each image, output and place [X,O], one backward pass at a time in float64; `dim`: where O stands."""
    model = deepcopy(dense).double().requires_grad_(True)
    layer = model.get_submodule(name)
    given = list[Tensor]()
    layer.register_forward_hook(lambda _, __, out: given.append(out))
    rows = []
    for image in pixels.double():
        with torch.enable_grad():
            outputs = model(image[None]).flatten()
            for output in outputs:
                (gradient,) = torch.autograd.grad(output, given[-1], retain_graph=True)
                rows.append(gradient.movedim(dim, -1).flatten(0, -2))
    return torch.cat(rows)


@pytest.mark.parametrize(("name", "weight"), [("vit", WEIGHT), ("resnet18", "layer1.0.conv2.weight")])
def test_metrics_are_the_mean_square_of_all_outputs_gradients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, weight: str
) -> None:
    """Random signs are that on average: here each direction is one output in its turn."""
    dense = tiny.checkpoint() if name == "vit" else convnet(name)
    (pixels,) = (
        tiny.opened(tmp_path / "x.npy", tiny.images(3), dense.model) if name == "vit" else images_of(name, 3)
    ).batches(3)
    assert isinstance(pixels, Tensor)
    outputs = dense.model(pixels).shape[1]
    turn = count()

    def each_in_turn(like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(turn) % outputs), outputs).to(like).expand_as(like)

    monkeypatch.setattr(program_effects, "signs", each_in_turn)
    monkeypatch.setattr(program_effects, "DIRECTIONS", outputs)
    (found,) = output_metrics(dense.model, pixels, {weight}).values()
    rows_XO = gradients_of_every_output(dense.model, weight.removesuffix(".weight"), pixels, -1 if name == "vit" else 1)
    expected = rows_XO.T @ rows_XO / len(rows_XO)
    alike = float(expected.diagonal().mean()) * torch.eye(len(expected), dtype=torch.float64)
    torch.testing.assert_close(found, expected + alike, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))


def lost_in_outputs(statistics: ChannelMoments, weight_OF: Tensor, metric_OO: Tensor, kept: list[int]) -> float:
    """tr(M D C D') of the best weights on the kept channels, by least squares in float64."""
    covariance = statistics.second_FF - torch.outer(statistics.mean_F, statistics.mean_F)
    root = torch.linalg.cholesky(covariance + 1e-12 * covariance.diagonal().mean() * torch.eye(len(covariance)))
    target = root.T @ weight_OF.T
    change = target - root.T[:, kept] @ torch.linalg.lstsq(root.T[:, kept], target).solution
    return float(((change @ metric_OO) * change).sum())


def test_the_channels_that_outputs_miss_least_go_first(tmp_path: Path) -> None:
    dense = tiny.checkpoint(mlp_ratio=0.5)
    moments = moments_of(tmp_path, dense)
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn(48, 3, generator=generator, dtype=torch.float64)
    metric_OO = factor @ factor.T + 1e-3 * torch.eye(48, dtype=torch.float64)
    site = sites_of(dense.model).by_name["blocks.1.mlp"]
    known = replace(moments, metrics={WEIGHT: metric_OO})
    order = kind_of(site).elimination(site, site_moments(site, known, CPU), METHOD)
    plain = kind_of(site).elimination(site, site_moments(site, moments, CPU), METHOD)
    assert order is not None
    assert plain is not None
    statistics = moments.sites["blocks.1.mlp.fc2"]
    assert isinstance(statistics, ChannelMoments)
    weight_OF = dense.model.get_parameter(WEIGHT).detach().double()
    left = list(range(24))
    for place in range(12):
        lost = {
            each: lost_in_outputs(statistics, weight_OF, metric_OO, [k for k in left if k != each]) for each in left
        }
        gone = int(order.order_F[place])
        assert lost[gone] <= 1.001 * min(lost.values())
        left.remove(gone)
        assert float(order.error_F[place]) == pytest.approx(lost[gone], rel=0.02)
    assert order.order_F[:12].tolist() != plain.order_F[:12].tolist()


def test_a_plan_learns_metrics_of_layers_whose_channels_are_chosen(tmp_path: Path) -> None:
    dense = tiny.checkpoint()
    (pixels,) = tiny.opened(tmp_path / "x.npy", tiny.images(4)).batches(4)
    assert set(site_metrics(dense.model, METHOD, pixels)) >= {f"blocks.{block}.mlp.fc2.weight" for block in (0, 1)}


def test_what_outputs_see_alone_is_kept(tmp_path: Path) -> None:
    """Where eight outputs of the layer count alone, less is lost of those."""
    dense = tiny.checkpoint()
    moments = moments_of(tmp_path, dense)
    blind_OO = torch.diag(torch.cat([torch.ones(8), torch.full((40,), 1e-9)])).double()
    site, weight_OF = sites_of(dense.model).by_name["blocks.1.mlp"], dense.model.get_parameter(WEIGHT).detach().double()
    statistics = moments.sites["blocks.1.mlp.fc2"]
    assert isinstance(statistics, ChannelMoments)

    def lost(known: Moments) -> float:
        chosen = kind_of(site).chosen(site, site_moments(site, known, CPU), METHOD, 48)
        assert chosen is not None
        return lost_in_outputs(statistics, weight_OF, blind_OO, chosen.tolist())

    assert lost(replace(moments, metrics={WEIGHT: blind_OO})) < 0.7 * lost(moments)


def test_a_budget_is_carried_out_by_what_was_learned(tmp_path: Path) -> None:
    """The same widths without it give other channels."""
    dense = tiny.checkpoint()
    images = tiny.opened(tmp_path / "images.npy", tiny.images(48), dense.model)
    moments = calibrate(dense, images, batch_size=8)
    request = request_of(ReduceOptions(macs=0.7, align={"mlp": 16, "head": 8}))
    reduction, planned = reduce_as_asked(dense, moments, request, images=images)
    assert planned.widths is not None
    assert WEIGHT in planned.metrics
    known, plain = (
        reduce(dense.model, replace(moments, metrics=metrics), planned.method, widths=planned.widths).model
        for metrics in (planned.metrics, {})
    )
    (pixels,) = tiny.opened(tmp_path / "y.npy", tiny.images(16, seed=3)).batches(16)
    with torch.inference_mode():
        found, expected, other = (model(pixels).double() for model in (reduction.model, known, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert float((other - expected).norm() / expected.norm()) > 1e-3
