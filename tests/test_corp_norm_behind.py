"""Closed loops through blocks whose norms stand behind their layers, and through branches side by side."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calib.images import Images
from corp_deploy.algebra.norm_behind import NormBehind
from corp_deploy.families.counting import macs
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.budget import dense_cost
from corp_deploy.planning.execution import reduce_as_asked
from corp_deploy.planning.request import request_of
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from tests import timm_models, tiny
from tests.small_models import error
from tests.timm_models import method

MODELS: dict[str, dict[str, object]] = {
    "residual post-norm": {"depth": 4, "init_values": 1.0, "global_pool": "avg"},
    "side by side": {"init_values": 0.5, "global_pool": "avg"},
}


@cache
def checkpoint(form: str) -> Checkpoint:
    """Gains of norms near one, as trained ones are."""
    state = timm_models.library(form, **MODELS[form]).state_dict()
    for key, parameter in state.items():
        if form == "residual post-norm" and ".norm" in key and key.endswith("weight"):
            parameter.copy_(0.5 + 0.2 * torch.rand(len(parameter)))
    return timm_models.of_state(form, state, **MODELS[form])


def opened(model: nn.Module, count: int, seed: int = 0) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", timm_models.pixels(model, count, seed).numpy(), model)


def wanted_by_hand(gain_C: Tensor, offset_C: Tensor, added_C: Tensor, given_C: Tensor, damping: float) -> Tensor:
    """By lstsq over all changes that keep the mean and the deviation, their slope through the norm by torch."""
    width = len(given_C)

    def normed(y_C: Tensor) -> Tensor:
        return F.layer_norm(y_C, (width,), gain_C, offset_C, 1e-6)

    slope_CC = torch.autograd.functional.jacobian(normed, given_C)
    fixed_2C = torch.stack([torch.ones_like(given_C), given_C - given_C.mean()])
    basis_CT = torch.linalg.svd(fixed_2C)[2][torch.linalg.matrix_rank(fixed_2C) :].T
    sigma = (given_C.var(correction=0) + 1e-6).sqrt()
    pull = (damping * gain_C.square().mean()).sqrt() / sigma
    rows = torch.cat([slope_CC @ basis_CT, pull * basis_CT])
    drift_C = torch.cat([added_C - normed(given_C), torch.zeros(width, dtype=added_C.dtype)])
    change_T: Tensor = torch.linalg.lstsq(rows, drift_C[:, None], driver="gelsd").solution.squeeze(1)
    return given_C + basis_CT @ change_T


@pytest.mark.parametrize("case", ["random", "silent channels", "one large channel", "constant"])
def test_what_a_layer_should_give_is_the_damped_least_squares_answer(case: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gain_C, offset_C, given_XC, drift_XC = drawn(7), drawn(7), drawn(5, 7), drawn(5, 7)
    if case == "silent channels":
        gain_C[:2] = torch.tensor([0.0, 1e-9])
    if case == "one large channel":
        given_XC[:, 3] += 1e3
    if case == "constant":
        given_XC[:] = 0.7
    added_XC = F.layer_norm(given_XC, (7,), gain_C, offset_C, 1e-6) + drift_XC
    norm = NormBehind(gain_C=gain_C, offset_C=offset_C, eps=1e-6)
    before_XC = norm.before(added_XC[None], given_XC[None])[0]
    for before_C, added_C, given_C in zip(before_XC, added_XC, given_XC, strict=True):
        expected_C = wanted_by_hand(gain_C, offset_C, added_C, given_C, norm.damping)
        torch.testing.assert_close(before_C, gain_C * expected_C, rtol=1e-7, atol=1e-9)
    still_XC = F.layer_norm(given_XC, (7,), gain_C, offset_C, 1e-6)
    torch.testing.assert_close(norm.before(still_XC[None], given_XC[None])[0], gain_C * given_XC)


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", MODELS)
def test_the_closed_loop_is_no_worse_than_the_open_one(form: str) -> None:
    dense = checkpoint(form)
    model, others = dense.model, timm_models.pixels(dense.model, 48, seed=9)
    images = opened(model, 96)
    moments = calibrate(dense, images, batch_size=16)
    asked = method_from_preset(
        "best", geometry="square", mlp_sparsity=0.75, attention_sparsity=0.5, align_hidden=8, align_head=8
    )
    looped = reduce_traced(model, images, asked, loop=Loop())
    assert all(report.loop is not None for report in looped.sites if report.part != "qk")
    ratio = error(looped.model, model, others) / error(reduce(model, moments, asked).model, model, others)
    assert ratio < 1.0, ratio


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", MODELS)
def test_a_budget_is_kept_in_the_closed_loop(form: str) -> None:
    dense = checkpoint(form)
    model, images = dense.model, opened(dense.model, 48)
    moments = calibrate(dense, images, batch_size=16)
    request = request_of(
        ReduceOptions(macs=0.75, heads="square", align={"mlp": 8, "head": 8}, closed_loop="asymmetric")
    )
    reduction, _ = reduce_as_asked(dense, moments, request, images=images)
    widths = {site.name: site.width for site in sites_of(reduction.model).every}
    assert any(widths[site.name] < site.width for site in sites_of(model).every)
    assert macs(reduction.model) / dense_cost(model, "macs") <= 0.75
    assert all(report.loop is not None for report in reduction.sites if report.part != "qk")


@pytest.mark.parametrize("form", MODELS)
def test_nothing_removed_is_the_dense_model(form: str) -> None:
    model = checkpoint(form).model
    whole = {site.name: site.width for site in sites_of(model).every}
    images = timm_models.pixels(model, 4, seed=5)
    assert (
        error(reduce_traced(model, opened(model, 16), method(), widths=whole, loop=Loop()).model, model, images) < 1e-5
    )
