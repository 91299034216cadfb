"""Elimination that knows its target, and ridges of the closed loop chosen by halves: against brute force in float64;
refits toward a prior against least squares on raw samples.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calib.images import Images
from corp_deploy.algebra.channels import affine
from corp_deploy.algebra.obs import obs
from corp_deploy.algebra.regression import RegressionSums, refit_toward
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.correct import STRENGTHS, divide_by_scale, fit_corrections
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from tests import tiny
from tests.test_corp_sparse_algebra import regression_of

Draw = tuple[Tensor, Tensor, Tensor]


def draw(seed: int, *, count: int = 60, width: int = 8, outputs: int = 3, rank: int | None = None) -> Draw:
    """Inputs [X,F], targets that no layer gives [X,O], and the layer so far [O,F]."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank or width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    x = torch.randn(count, rank or width, dtype=torch.float64, generator=generator) @ mix + 0.5
    prior = torch.randn(outputs, width, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    other = torch.randn(outputs, width, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(count, outputs, dtype=torch.float64, generator=generator)
    return x, x @ (prior + other).T + noise + 2.0, prior


def loss(drawn: Draw, kept: list[int], ridge: float) -> tuple[float, Tensor]:
    """min over W_S and b of mean |t - W_S x_S - b|^2 + ridge |W - prior|^2, W zero on what is gone; and W_S."""
    x, t, prior = drawn
    gone = [channel for channel in range(x.shape[1]) if channel not in kept]
    x_S, t_0 = x[:, kept] - x[:, kept].mean(0), t - t.mean(0)
    root = (ridge * len(x)) ** 0.5
    rows = torch.cat((x_S, root * torch.eye(len(kept), dtype=torch.float64)))
    wanted = torch.cat((t_0, root * prior[:, kept].T))
    weight = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
    left = (rows @ weight - wanted).square().sum() / len(x)
    return float(left + ridge * prior[:, gone].square().sum()), weight.T


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("seed", range(4))
def test_elimination_on_the_fitted_layer_equals_elimination_on_the_regression(seed: int, rank: int | None) -> None:
    """Every removal is the one of least loss with the best weights on all that stay, and costs what it costs."""
    drawn = draw(seed, rank=rank)
    x, t, prior = drawn
    strength = 1e-2
    regression = regression_of(x, t)
    start = refit_toward(prior, regression, strength=strength)
    order = obs(regression.covariance_KK, start.weight_OK, ridge_rel=strength)
    ridge = strength * float(regression.covariance_KK.diagonal().mean())
    kept = list(range(x.shape[1]))
    whole = loss(drawn, kept, ridge)[0]
    for position in range(x.shape[1] - 1):
        after = {channel: loss(drawn, [each for each in kept if each != channel], ridge)[0] for channel in kept}
        least = min(after, key=lambda channel: after[channel])
        assert int(order.order_F[position]) == least
        kept.remove(least)
        assert float(order.error_F[position]) == pytest.approx(after[least] - whole, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("rank", [None, 5])
def test_recovery_on_the_fitted_layer_is_ridge_regression_toward_dense_columns(rank: int | None) -> None:
    drawn = draw(3, rank=rank)
    x, t, prior = drawn
    strength, kept = 1e-2, [0, 2, 3, 7]
    regression = regression_of(x, t)
    # A ridge is relative to the mean variance of the channels that it is added to.
    ridge = strength * float(regression.covariance_KK[kept][:, kept].diagonal().mean())
    start = refit_toward(prior, regression, strength=ridge / float(regression.covariance_KK.diagonal().mean()))
    got = affine(
        regression.mean_K, regression.second_KK, start.weight_OK, start.bias_O, torch.tensor(kept), ridge_rel=strength
    )
    expected = loss(drawn, kept, ridge)[1]
    torch.testing.assert_close(got.weight_OK, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got.bias_O, t.mean(0) - expected @ x[:, kept].mean(0), rtol=1e-8, atol=1e-8)


def summed(x: Tensor, t: Tensor) -> RegressionSums:
    sums = RegressionSums.empty(inputs=x.shape[1], outputs=t.shape[1])
    sums.add(x.unsqueeze(0), t.unsqueeze(0))
    return sums


@pytest.mark.parametrize("count", [5, 12, 600])
def test_layer_is_fitted_with_the_ridge_chosen_on_halves(count: int) -> None:
    """Few tokens, singular moments among them, and many; behind a layer scale of which one row is silent."""
    one, other = draw(1, count=count), draw(2, count=count + 2)
    prior, bias = one[2], torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    scale = torch.tensor([2.0, 0.5, 0.0], dtype=torch.float64)

    def left(drawn: Draw) -> Tensor:
        return drawn[1] - (drawn[0] @ prior.T + bias) * scale

    def fitted(parts: list[Draw], strength: float) -> tuple[Tensor, Tensor]:
        x, t = torch.cat([part[0] for part in parts]), torch.cat([left(part) for part in parts])
        centred = x - x.mean(0)
        root = (strength * float(centred.square().mean()) * len(x)) ** 0.5
        rows = torch.cat((centred, root * torch.eye(8, dtype=torch.float64)))
        wanted = torch.cat((t - t.mean(0), torch.zeros(8, 3, dtype=torch.float64)))
        weight = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution.T
        return weight, t.mean(0) - weight @ x.mean(0)

    def error(fit: tuple[Tensor, Tensor], part: Draw) -> float:
        return float((left(part) - part[0] @ fit[0].T - fit[1]).square().sum() / len(part[0]))

    none = (torch.zeros(3, 8, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    errors: dict[float | None, float] = {None: (error(none, one) + error(none, other)) / 2}
    for strength in STRENGTHS:
        ways = ((one, other), (other, one))
        errors[strength] = sum(error(fitted([own], strength), judge) for own, judge in ways) / 2
    best = min(errors, key=lambda each: errors[each])
    expected = none if best is None else fitted([one, other], best / 2)

    sums = summed(one[0], left(one)), summed(other[0], left(other))
    (changes,), fit = fit_corrections([sums], 1.0, STRENGTHS, both_ways=True)
    assert fit.strength == best
    assert (fit.error_held_out, fit.error_recovered) == pytest.approx((errors[best], errors[None]), rel=1e-3)
    weight_OF, bias_O = (divide_by_scale(each, scale) for each in changes)
    for row in (0, 1):
        torch.testing.assert_close(weight_OF[row], expected[0][row] / scale[row], rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(bias_O[row], expected[1][row] / scale[row], rtol=1e-4, atol=1e-4)
    assert not weight_OF[2].any()


def opened(path: Path, count: int) -> Images:
    return tiny.opened(path, tiny.images(count, seed=3))


def test_closed_loop_uses_the_halves_of_the_moments(tmp_path: Path) -> None:
    model, images = tiny.checkpoint().model, opened(tmp_path / "images.npy", 24)
    half: dict[str, Any] = {"mlp_sparsity": 0.5, "attention_sparsity": 0.5, "align_hidden": 8, "align_head": 8}
    method = method_from_preset("best", geometry="square", **half)
    halved, mirrored = (
        reduce_traced(model, images, method, loop=Loop(half_ids=images.ids[first::2])) for first in (0, 1)
    )
    for one, other in zip(halved.sites, mirrored.sites, strict=True):
        assert (one.ridge_fit is None, one.loop is None) == (one.part == "qk", other.loop is None)
    pixels = torch.from_numpy(tiny.images(6, seed=5))
    torch.testing.assert_close(halved.model(pixels), mirrored.model(pixels), rtol=1e-3, atol=1e-3)


def error_on(x: Tensor, t: Tensor, weight: Tensor, bias: Tensor) -> float:
    return float((t - x @ weight.T - bias).square().sum(dim=1).mean())


@pytest.mark.parametrize("strength", [0.0, 1e-3, 0.1, 3.0, 1e6])
def test_refit_minimises_its_objective(strength: float) -> None:
    x, t, prior = draw(0, count=80)
    result = refit_toward(prior, regression_of(x, t), strength=strength)
    ridge = strength * float(x.var(dim=0, correction=0).mean())
    assert result.ridge == pytest.approx(ridge)
    rows = np.vstack((np.hstack((x.numpy(), np.ones((80, 1)))) / 80**0.5, ridge**0.5 * np.eye(8, 9)))
    targets = np.vstack((t.numpy() / 80**0.5, ridge**0.5 * prior.numpy().T))
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    np.testing.assert_allclose(result.weight_OK, expected[:, :8], rtol=1e-7)
    np.testing.assert_allclose(result.bias_O, expected[:, 8], rtol=1e-7)
    assert result.residual == pytest.approx(error_on(x, t, result.weight_OK, result.bias_O), rel=1e-8)


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 12), strength=st.sampled_from([0.0, 1e-6, 0.1, 1e8]))
@settings(max_examples=50, deadline=None)
def test_refit_is_never_worse_than_its_prior(seed: int, tokens: int, strength: float) -> None:
    x, t, prior = draw(seed, count=tokens)
    result = refit_toward(prior, regression_of(x, t), strength=strength)
    best = (t - x @ prior.T).mean(dim=0)
    assert result.residual_prior == pytest.approx(error_on(x, t, prior, best), rel=1e-6, abs=1e-9)
    assert result.residual <= result.residual_prior * (1 + 1e-9) + 1e-9


def test_foreign_ids_make_no_halves(tmp_path: Path) -> None:
    """Then some images are held out, which don't choose ridges."""
    model, images = tiny.checkpoint().model, opened(tmp_path / "images.npy", 12)
    method = method_from_preset("best", mlp_sparsity=0.5, align_hidden=8)
    unknown = reduce_traced(model, images, method, loop=Loop(half_ids=torch.tensor([5])))
    assert [site.ridge_fit for site in unknown.sites] == [None, None]
    plain = reduce_traced(model, images, method, loop=Loop())
    assert [site.loop for site in unknown.sites] == [site.loop for site in plain.sites]
