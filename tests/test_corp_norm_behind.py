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
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.model_cost import macs
from corp_deploy.families.steps import Branch, Walk
from corp_deploy.planning.budget import dense_cost
from corp_deploy.planning.carry_out import reduce_as_asked
from corp_deploy.planning.request import Budget, ReductionRequest
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.branch_sums import channel_sums, dense_advanced, inputs_sums
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_closed_loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.streams import Streams
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from ground.errors import BadInput
from tests import biased_models, tiny, vit_forms
from tests.small_models import error, outputs
from tests.test_corp_timm_planted import planted
from tests.vit_forms import SMALL, method

DEEP = SMALL | {"depth": 4, "init_values": 1.0, "global_pool": "avg"}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "residual post-norm": ("vit_base_patch16_rpn_224", DEEP),
    "side by side": ("vit_small_patch16_18x2_224", DEEP | {"depth": 2, "init_values": 0.5}),
}


@cache
def checkpoint(form: str) -> Checkpoint:
    """Gains of norms near one, as trained ones are."""
    torch.manual_seed(0)
    name, kwargs = MODELS[form]
    architecture = Architecture(name=name, kwargs=kwargs)
    model = dense_from_architecture(architecture)
    tiny.enliven(model, 0)
    with torch.no_grad():
        for step in family_of(model).steps(model):
            if isinstance(step, Branch) and step.behind is not None:
                step.behind.weight.copy_(0.5 + 0.2 * torch.rand(len(step.behind.weight)))
    return Checkpoint(model=model, architecture=architecture, lineage={})


def opened(model: nn.Module, count: int, seed: int = 0) -> Images:
    return tiny.opened(Path(mkdtemp()) / "images.npy", biased_models.pixels(model, count, seed).numpy(), model)


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
    wanted_C: Tensor = given_C + basis_CT @ change_T
    return wanted_C


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


@pytest.mark.parametrize("form", MODELS)
@torch.no_grad()
def test_the_steps_make_the_models_own_outputs(form: str) -> None:
    model = checkpoint(form).model
    images, family = biased_models.pixels(model, 3), family_of(model)
    walk = Walk.of(family.embedded(model, images), None)
    for step in family.steps(model):
        walk = walk.behind(step)
    torch.testing.assert_close(family.finished(model, walk.tokens.x, images), model(images), rtol=1e-4, atol=1e-5)


def shifted(model: nn.Module, name: str) -> tuple[Branch, Streams]:
    """Both streams before a branch, the reduced one shifted where the branch is reached."""
    family = family_of(model)
    streams = Streams([(family.embedded(model, biased_models.pixels(model, 8)), None)])
    for step in family.steps(model):
        if isinstance(step, Branch) and step.name == name:
            return step, streams
        streams.advance(step)
        if isinstance(step, Branch):
            for pair in streams:
                noise = torch.randn(pair.dense.shape, generator=torch.Generator().manual_seed(2))
                pair.reduced = pair.reduced + 0.1 * noise
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("residual post-norm", "blocks.1.attn"),
        ("residual post-norm", "blocks.1.mlp"),
        ("side by side", "blocks.1.attns.1.attn"),
        ("side by side", "blocks.1.ffns.1.mlp"),
    ],
)
@torch.no_grad()
def test_sums_are_those_of_a_loop_over_tokens(form: str, name: str) -> None:
    """Token by token in float64: what enters the last layer, the target in front of the norm, and how it counts."""
    model = checkpoint(form).model
    branch, streams = shifted(model, name)
    site = sites_of(model).linear_by_name[name]
    x, t, w = (list[Tensor]() for _ in range(3))
    heard: list[Tensor] = []
    handle = site.last.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    width = site.last.out_features
    for pair in streams:
        if pair.held_out:
            continue
        dense, reduced = pair.dense, pair.reduced
        given = branch.layer(branch.norm(dense[..., -width:]))
        branch.layer(branch.norm(reduced[..., -width:]))
        entering = heard[-1]
        normed = given if branch.behind is None else branch.behind(given)
        added = normed if branch.scale_C is None else normed * branch.scale_C
        for place in [(image, token) for image in range(len(dense)) for token in range(dense.shape[1])]:
            target = (dense[..., :width][place] + added[place] - reduced[..., :width][place]).double()
            count = 1.0
            if branch.behind is not None:
                own = given[place].double()
                gain, offset = branch.behind.weight.double(), branch.behind.bias.double()
                target = gain * wanted_by_hand(gain, offset, target, own, 0.1)
                count = 1.0 / float(own.var(correction=0) + branch.behind.eps)
            x, t, w = [*x, entering[place].double()], [*t, target], [*w, torch.tensor(count).double()]
    handle.remove()
    dense_advanced(branch, streams)
    if isinstance(site, ChannelSite):
        sums = channel_sums(branch, site, streams)[1].fit
    else:
        sums = inputs_sums(branch, branch.layer, site.last, streams).fit
    x_XK, t_XO, w_X = torch.stack(x), torch.stack(t), torch.stack(w)
    for mine, expected in (
        (torch.tensor(sums.x.tokens).double(), w_X.sum()),
        (sums.x.gram_KK, x_XK.T @ (w_X[:, None] * x_XK)),
        (sums.tx_OK, t_XO.T @ (w_X[:, None] * x_XK)),
        (sums.t_O, w_X @ t_XO),
        (sums.tt, (w_X * t_XO.square().sum(dim=1)).sum()),
    ):
        torch.testing.assert_close(mine, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", MODELS)
def test_the_closed_loop_is_no_worse_than_the_open_one(form: str) -> None:
    dense = checkpoint(form)
    model, others = dense.model, biased_models.pixels(dense.model, 48, seed=9)
    images = opened(model, 96)
    moments = calibrate(dense, images, batch_size=16)
    asked = method_from_preset(
        "best", geometry="square", mlp_sparsity=0.75, attention_sparsity=0.5, align_hidden=8, align_head=8
    )
    looped = reduce_closed_loop(model, images, asked)
    assert all(report.loop is not None for report in looped.sites if report.part != "qk")
    ratio = error(looped.model, model, others) / error(reduce(model, moments, asked).model, model, others)
    assert ratio < 1.0, ratio


@pytest.mark.slow("models")
@pytest.mark.parametrize("form", ["residual post-norm", "side by side"])
def test_a_budget_is_kept_in_the_closed_loop(form: str) -> None:
    dense = checkpoint(form)
    model, images = dense.model, opened(dense.model, 48)
    moments = calibrate(dense, images, batch_size=16)
    request = ReductionRequest(
        preset="best",
        method=method_from_preset("best", geometry="square", align_hidden=8, align_head=8),
        budget=Budget(currency="macs", share=0.75),
        closed_loop="asymmetric",
    )
    reduction, _ = reduce_as_asked(dense, moments, request, images=images)
    widths = {site.name: site.size for site in sites_of(reduction.model).every}
    assert any(widths[site.name] < site.size for site in sites_of(model).every)
    assert macs(reduction.model) / dense_cost(model, "macs") <= 0.75
    assert all(report.loop is not None for report in reduction.sites if report.part != "qk")


@pytest.mark.parametrize("form", ["residual post-norm", "side by side"])
def test_planted_redundancy_is_removed_in_the_closed_loop(form: str) -> None:
    model = planted(form).model
    done = reduce_closed_loop(model, vit_forms.opened(model), method(geometry="square")).model
    assert all(site.size <= 96 for site in sites_of(done).every)
    assert error(done, model, biased_models.pixels(model, 8, seed=5)) < 1e-3


@pytest.mark.parametrize("form", ["residual post-norm", "side by side"])
def test_nothing_removed_is_the_dense_model(form: str) -> None:
    model = checkpoint(form).model
    whole = {site.name: site.width for site in sites_of(model).every}
    images = biased_models.pixels(model, 4, seed=5)
    assert error(reduce_closed_loop(model, opened(model, 16), method(), widths=whole).model, model, images) < 1e-5


@pytest.mark.parametrize("form", ["residual post-norm", "side by side"])
def test_blocks_are_polished_and_layers_where_no_norm_is_behind_them(form: str) -> None:
    dense = checkpoint(form)
    model, images = dense.model, opened(dense.model, 24)
    reduced = reduce(model, calibrate(dense, images, batch_size=8), method(attention_sparsity=None)).model
    blocks = polished(model, reduced, images, PolishOptions(how="block", steps=2, batch_size=4))
    assert [part.part for part in blocks.report.parts] == [f"blocks.{each}" for each in range(len(model.blocks))]  # type: ignore[arg-type]
    layers = PolishOptions(how="layer", steps=1, batch_size=4)
    if form == "residual post-norm":
        with pytest.raises(BadInput, match=r"polish layer: blocks\.0\.mlp, .* have a norm behind them"):
            polished(model, reduced, images, layers)
    else:
        assert polished(model, reduced, images, layers).report.error <= blocks.report.error_before


def test_other_norms_behind_layers_are_not_fitted_in_front_of() -> None:
    name, kwargs = vit_forms.FORMS["residual post-norm"]
    model = dense_from_architecture(Architecture(name=name, kwargs=kwargs | {"norm_layer": "rmsnorm"}))
    assert [site for site in sites_of(model).every if isinstance(site, HeadSite)]
    with pytest.raises(BadInput, match="can't be taken apart"):
        reduce_closed_loop(model, vit_forms.opened(model), method())


def test_outputs_are_those_of_blocks_side_by_side() -> None:
    model = checkpoint("side by side").model
    steps = [(type(step).__name__, step.name) for step in family_of(model).steps(model)][:4]
    assert steps == [
        ("Fork", "blocks.0"), ("Branch", "blocks.0.attns.0.attn"), ("Branch", "blocks.0.attns.1.attn"),
        ("Join", "blocks.0"),
    ]  # fmt: skip
    assert outputs(model, biased_models.pixels(model, 2)).isfinite().all()
