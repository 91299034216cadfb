"""Gated MLPs (SwiGLU, GeGLU): channels are products of two rows, kept, repaired, counted and written in pairs."""

from collections.abc import Callable

import pytest
import torch
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn

from calib.moments import ChannelMoments
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.counting import count
from corp_deploy.families.modules import parameters, replaced
from corp_deploy.families.timm_mlps import channel_site, mlp_refusal
from corp_deploy.reduction.kind import LinearReduced
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.model import reduce
from ground.ports import Port
from tests import vit_forms
from tests.vit_forms import method

DIM, HIDDEN, KEPT = 12, 40, 16
MLPS: dict[str, Callable[[], nn.Module]] = {
    "packed, first half gated": lambda: SwiGLUPacked(DIM, 2 * HIDDEN),
    "packed, second half gated": lambda: GluMlp(DIM, 2 * HIDDEN, act_layer=nn.SiLU),
    "apart": lambda: SwiGLU(DIM, HIDDEN),
    "apart, without biases": lambda: SwiGLU(DIM, HIDDEN, bias=False),
    "behind a norm": lambda: GeGluMlp(DIM, HIDDEN),
}


class Alone(nn.Module):
    """One MLP, called by its name in a model."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return out


@pytest.fixture(params=MLPS)
def alone(request: pytest.FixtureRequest) -> Alone:
    torch.manual_seed(3)
    model = Alone(MLPS[request.param]()).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def site_of(model: Alone) -> ChannelSite:
    assert mlp_refusal(model.mlp) == ""
    return channel_site("mlp", model.mlp)


def entering_last(model: Alone, x_BNC: Tensor) -> Tensor:
    heard: list[Tensor] = []
    handle = site_of(model).last.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    model(x_BNC)
    handle.remove()
    return heard[0].double().flatten(0, 1)


def rows(model: Alone) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Of the row that passes the activation and of the other: weights [F,I], biases [F], by the forward's own words."""
    mlp = model.mlp
    match mlp:
        case SwiGLU():
            gate, other = mlp.fc1_g, mlp.fc1_x
        case GeGluMlp():
            gate, other = mlp.w0, mlp.w1
        case GluMlp():
            assert mlp.fc1.bias is not None
            weights, biases = mlp.fc1.weight.chunk(2), mlp.fc1.bias.chunk(2)
            order = (1, 0) if mlp.gate_last else (0, 1)
            return weights[order[0]], weights[order[1]], biases[order[0]], biases[order[1]]
        case _:
            raise AssertionError(mlp)
    return gate.weight, other.weight, gate.bias, other.bias


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, DIM, generator=torch.Generator().manual_seed(seed))


def moments_of(model: Alone, x_BNC: Tensor) -> ChannelMoments:
    x_XF = entering_last(model, x_BNC)
    active_F = (x_XF.abs() > 1e-3).sum(dim=0).double()
    return ChannelMoments(tokens=len(x_XF), eps=1e-3, sum_F=x_XF.sum(0), gram_FF=x_XF.mT @ x_XF, active_F=active_F)


def reduced(model: Alone, preset: str = "best", width: int = KEPT, **changes: object) -> tuple[Alone, LinearReduced]:
    site = site_of(model)
    new = kind_of(site).reduced(site, moments_of(model, tokens(80)), method(preset, **changes), width)
    narrower = replaced(model, new.modules).requires_grad_(False)
    assert isinstance(narrower, Alone)
    assert isinstance(new, LinearReduced)
    return narrower, new


def test_the_hidden_channels_are_products(alone: Alone) -> None:
    x = tokens(3)
    entering = alone.mlp.norm(x) if isinstance(alone.mlp, GeGluMlp) else x
    gate, other, gate_bias, other_bias = rows(alone)
    passed = alone.mlp.get_submodule("act")(nn.functional.linear(entering, gate, gate_bias))
    product = passed * nn.functional.linear(entering, other, other_bias)
    assert torch.allclose(entering_last(alone, x).float(), product.flatten(0, 1), atol=1e-6)
    assert (site_of(alone).width, site_of(alone).rows) == (HIDDEN, 2)


@pytest.mark.parametrize("preset", ["best", "corp", "none", "vbp", "grail"])
def test_rows_are_kept_in_pairs(alone: Alone, preset: str) -> None:
    narrower, new = reduced(alone, preset)
    assert new.kept_K is not None
    assert site_of(narrower).width == len(new.kept_K) == KEPT
    for of_dense, of_new in zip(rows(alone), rows(narrower), strict=True):
        assert (of_dense is None) == (of_new is None)
        if of_dense is not None and of_new is not None:
            assert torch.equal(of_new, of_dense[new.kept_K])
    x = tokens(4, seed=9)
    assert torch.allclose(entering_last(narrower, x), entering_last(alone, x)[:, new.kept_K], atol=1e-6)


def test_the_last_layer_is_the_regression_on_what_is_kept(alone: Alone) -> None:
    narrower, new = reduced(alone, ridge_rel=1e-11)
    x_XF = entering_last(alone, tokens(80))
    y_XO = alone(tokens(80)).double().flatten(0, 1)
    inputs = torch.cat([x_XF[:, new.kept_K], torch.ones(len(x_XF), 1, dtype=torch.float64)], dim=1)
    exact = torch.linalg.lstsq(inputs, y_XO).solution
    assert torch.allclose(site_of(narrower).last.weight.double(), exact[:-1].mT, atol=1e-5)
    assert torch.allclose(site_of(narrower).last.bias.double(), exact[-1], atol=1e-5)


@pytest.mark.parametrize("ranking", ["producer-l1", "producer-l2"])
def test_rows_of_both_layers_rank_a_channel(alone: Alone, ranking: str) -> None:
    _, new = reduced(alone, "corp", mlp_selection=ranking)
    gate, other, _, _ = rows(alone)
    scores = []
    for channel in range(HIDDEN):
        both = [*gate[channel].double().tolist(), *other[channel].double().tolist()]
        scores.append(sum(map(abs, both)) if ranking == "producer-l1" else sum(each * each for each in both) ** 0.5)
    best = sorted(range(HIDDEN), key=scores.__getitem__)[-KEPT:]
    assert new.kept_K is not None
    assert new.kept_K.tolist() == sorted(best)


def test_planted_copies_are_removed_at_no_loss(alone: Alone) -> None:
    """Of each channel there are copies whose product is twice or half of it."""
    for of_layer, factor in zip(rows(alone), (1.0, 2.0, 1.0, 2.0), strict=True):
        if of_layer is not None:
            of_layer[KEPT : 2 * KEPT] = factor * of_layer[:KEPT]
            of_layer[2 * KEPT :] = of_layer[: HIDDEN - 2 * KEPT]
    narrower, _ = reduced(alone)
    dense, left = (model(tokens(20, seed=5)) for model in (alone, narrower))
    assert float((left - dense).norm() / dense.norm()) < 1e-3


def test_repairs_are_better_than_none(alone: Alone) -> None:
    x = tokens(80)
    errors = {}
    for preset in ("best", "corp", "none"):
        narrower, new = reduced(alone, preset)
        errors[preset] = float((narrower(x) - alone(x)).double().square().sum(-1).mean())
        assert errors[preset] == pytest.approx(new.reports[0].error, rel=1e-4)
    assert errors["best"] <= errors["corp"] <= errors["none"]


def test_costs_are_those_of_three_layers(alone: Alone) -> None:
    port = Port(name="tokens", shape=(5, DIM))
    for model in (alone, reduced(alone)[0]):
        site = site_of(model)
        assert count(model, (port,)).macs == 3 * 5 * DIM * site.width == site.macs(site.width, "padded", 5)
        assert parameters(*site.modules) == site.parameters(site.width, "padded")
    bias = site_of(alone).first.bias is not None
    assert site_of(alone).parameters(8, "padded") == (DIM + bias) * 16 + (8 + 1) * DIM


@pytest.mark.parametrize("preset", ["best", "corp"])
def test_full_width_is_the_dense_layer(alone: Alone, preset: str) -> None:
    narrower, _ = reduced(alone, preset, width=HIDDEN)
    assert torch.allclose(narrower(tokens(4)), alone(tokens(4)), atol=1e-5)


def test_a_constant_may_stay(alone: Alone) -> None:
    narrower, _ = reduced(alone, width=0)
    mean = alone(tokens(80)).flatten(0, 1).mean(dim=0)
    assert torch.allclose(narrower(tokens(2, seed=8)), mean.expand(2, 5, DIM), atol=1e-5)
    plain = replaced(narrower, site_of(narrower).plain())
    assert torch.allclose(plain(tokens(2)), mean.expand(DIM), atol=1e-5)


@pytest.mark.parametrize("form", ["packed gate", "gate apart"])
def test_folding_leaves_gated_layers_alone_and_says_why(form: str) -> None:
    dense, asked = vit_forms.checkpoint(form).model, method("fold", attention_sparsity=None)
    done = reduce(dense, vit_forms.moments(form), asked, images=vit_forms.opened(dense))
    assert done.sites == ()
    assert set(done.coverage.refused) == {"blocks.0.mlp", "blocks.1.mlp"}
    assert all("product of two means" in reason for reason in done.coverage.refused.values())
