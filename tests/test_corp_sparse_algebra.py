"""k:n patterns and the refit of kept weights, compared with gradients by row and with loops."""

from itertools import combinations
from typing import get_args

import pytest
import torch
from torch import Tensor

from corp_deploy.algebra.regression import Regression
from corp_deploy.algebra.sparse_patterns import cast_mask, cast_order, holds, magnitude_mask, obs_mask, saliency
from corp_deploy.algebra.sparse_refit import Objective, Sparse, damp, refit_mask, sparse_layer
from corp_deploy.spec.sparsity import Rule, Sparsity, sparsity_from_text
from tests.refusals import rejects

TWO_OF_FOUR = Sparsity(kept=2, of=4)
INPUTS, OUTPUTS, TOKENS = 24, 10, 300
KINDS = ("random", "ill-conditioned", "singular")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samples(kind: str) -> Tensor:
    """Draw inputs [X,K] with a mean."""
    x_XK = drawn(TOKENS, INPUTS, seed=1) @ drawn(INPUTS, INPUTS, seed=2)
    if kind == "ill-conditioned":
        x_XK = x_XK @ torch.diag(torch.logspace(0, -3, INPUTS, dtype=torch.float64))
    if kind == "singular":
        x_XK[:, 5], x_XK[:, 9] = x_XK[:, 4], 0.0
        x_XK[:, 20:] = x_XK[:, :4]
    return x_XK + drawn(INPUTS, seed=3)


def regression_of(x_XK: Tensor, t_XO: Tensor) -> Regression:
    count = len(x_XK)
    return Regression(
        mean_K=x_XK.mean(0),
        second_KK=x_XK.T @ x_XK / count,
        mean_O=t_XO.mean(0),
        cross_OK=t_XO.T @ x_XK / count,
        target_square=float(t_XO.square().sum()) / count,
    )


def problem(kind: str, *, ridge_rel: float, fits_bias: bool = True) -> tuple[Objective, Tensor, Tensor, Tensor]:
    """Make a layer's objective with targets of other inputs, and return it with bias, inputs and targets."""
    x_XK, dense_OK, bias_O = samples(kind), drawn(OUTPUTS, INPUTS, seed=4), drawn(OUTPUTS, seed=5)
    bias_O = bias_O if fits_bias else torch.zeros_like(bias_O)
    t_XO = (x_XK + 0.2 * drawn(TOKENS, INPUTS, seed=6)) @ dense_OK.T + bias_O
    regression = regression_of(x_XK, t_XO)
    objective = Objective(regression=regression, dense_OK=dense_OK, ridge_rel=ridge_rel, fits_bias=fits_bias)
    return objective, bias_O, x_XK, t_XO


def require_refitted(sparse: Sparse, objective: Objective, x_XK: Tensor, t_XO: Tensor) -> None:
    """Require zero gradients of every row's objective by each kept weight and by the bias."""
    left_XO = x_XK @ sparse.weight_OK.T + sparse.bias_O - t_XO
    spread_XK = x_XK - x_XK.mean(0) if objective.fits_bias else x_XK
    ridge = objective.ridge_rel * float(spread_XK.square().mean(0).mean())
    gradient_OK = left_XO.T @ x_XK / TOKENS + ridge * (sparse.weight_OK - objective.dense_OK)
    scale = float((t_XO.T @ x_XK).abs().max()) / TOKENS
    assert float((gradient_OK * (sparse.weight_OK != 0.0)).abs().max()) < (1e-12 if ridge else 1e-8) * scale
    assert float((left_XO.mean(0) if objective.fits_bias else sparse.bias_O).abs().max()) < 1e-9 * scale
    assert sparse.error == pytest.approx(float(left_XO.square().sum()) / TOKENS, rel=1e-8)


@pytest.mark.parametrize("fits_bias", [True, False])
@pytest.mark.parametrize("rule", get_args(Rule))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ridge_rel", [0.0, 1e-4, 1.0])
def test_refit_is_least_squares_on_each_rows_support(kind: str, rule: Rule, ridge_rel: float, fits_bias: bool) -> None:
    """The refit is never worse than the masked dense weights."""
    objective, bias_O, x_XK, t_XO = problem(kind, ridge_rel=ridge_rel, fits_bias=fits_bias)
    sparse = sparse_layer(objective, bias_O, TWO_OF_FOUR, rule)
    require_refitted(sparse, objective, x_XK, t_XO)
    assert holds(sparse.weight_OK, TWO_OF_FOUR)
    masked = float((t_XO - x_XK @ (objective.dense_OK * (sparse.weight_OK != 0.0)).T - bias_O).square().sum()) / TOKENS
    assert sparse.error_masked == pytest.approx(masked, rel=1e-8)
    assert sparse.error <= sparse.error_masked * (1.0 + 1e-12)


def test_rows_with_equal_support_are_solved_together() -> None:
    objective, bias_O, x_XK, t_XO = problem("random", ridge_rel=1e-4)
    alike_OK = torch.tensor([True, False, False, True]).repeat(OUTPUTS, INPUTS // 4)
    require_refitted(refit_mask(objective, bias_O, alike_OK), objective, x_XK, t_XO)


@pytest.mark.parametrize("rule", get_args(Rule))
def test_planted_sparse_weights_are_recovered(rule: Rule) -> None:
    """The targets are outputs of the planted weights, so the refit has no loss."""
    x_XK = samples("random")
    planted_OK = drawn(OUTPUTS, INPUTS, seed=7)
    planted_OK = planted_OK * magnitude_mask(planted_OK, TWO_OF_FOUR)
    bias_O = drawn(OUTPUTS, seed=8)
    regression = regression_of(x_XK, x_XK @ planted_OK.T + bias_O)
    objective = Objective(regression=regression, dense_OK=planted_OK, ridge_rel=1e-4)
    sparse = sparse_layer(objective, bias_O, TWO_OF_FOUR, rule)
    torch.testing.assert_close(sparse.weight_OK, planted_OK, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sparse.bias_O, bias_O, rtol=1e-8, atol=1e-8)
    assert sparse.error < 1e-10 * sparse.energy


def obs_by_loops(weight_OK: Tensor, hessian_KK: Tensor, sparsity: Sparsity) -> Tensor:
    """Choose each row's patterns group by group, with a solution over all later inputs for every pattern."""
    weight_OK, mask_OK = weight_OK.clone(), torch.ones_like(weight_OK, dtype=torch.bool)
    for row in range(len(weight_OK)):
        for start in range(0, weight_OK.shape[1], sparsity.of):
            w_X, inverse_XX = weight_OK[row, start:], torch.linalg.inv(hessian_KK[start:, start:])
            tried = []
            for dropped in combinations(range(sparsity.of), sparsity.of - sparsity.kept):
                at = torch.tensor(dropped)
                multiplier = torch.linalg.inv(inverse_XX[at[:, None], at]) @ w_X[at]
                tried.append((float(w_X[at] @ multiplier), at, inverse_XX[:, at] @ multiplier))
            _, at, change_X = min(tried, key=lambda each: each[0])
            mask_OK[row, start + at] = False
            weight_OK[row, start:] = w_X - change_X
    return mask_OK


@pytest.mark.parametrize("sparsity", [TWO_OF_FOUR, Sparsity(kept=1, of=4), Sparsity(kept=4, of=8)], ids=str)
def test_obs_tries_every_pattern_at_its_exact_cost(sparsity: Sparsity) -> None:
    x_XK = samples("random")
    hessian_KK = x_XK.T @ x_XK / TOKENS + 0.1 * torch.eye(INPUTS, dtype=torch.float64)
    weight_OK = drawn(OUTPUTS, INPUTS, seed=9)
    mask_OK = obs_mask(weight_OK, hessian_KK, sparsity)
    assert torch.equal(mask_OK, obs_by_loops(weight_OK, hessian_KK, sparsity))
    assert bool((mask_OK.view(-1, sparsity.of).sum(1) == sparsity.kept).all())


def test_cast_takes_the_cheapest_pattern_of_each_group() -> None:
    x_XK, weight_OK = samples("random"), drawn(OUTPUTS, INPUTS, seed=10)
    second_KK = x_XK.T @ x_XK / TOKENS
    mask_OK = cast_mask(weight_OK, second_KK, TWO_OF_FOUR)
    for row in range(OUTPUTS):
        for start in range(0, INPUTS, 4):
            costs, masks = [], []
            for kept in combinations(range(4), 2):
                mask = torch.zeros(4, dtype=torch.bool)
                mask[list(kept)] = True
                r = weight_OK[row, start : start + 4] * ~mask
                costs.append(float(r @ second_KK[start : start + 4, start : start + 4] @ r))
                masks.append(mask)
            assert torch.equal(mask_OK[row, start : start + 4], masks[costs.index(min(costs))])


def test_orders_put_one_channel_of_each_quantile_in_every_group() -> None:
    score_K = saliency(drawn(OUTPUTS, INPUTS, seed=12), drawn(INPUTS, seed=13).square())
    by_hand = (drawn(OUTPUTS, INPUTS, seed=12).square() * drawn(INPUTS, seed=13).square()).sum(0)
    torch.testing.assert_close(score_K, by_hand)
    for block in (INPUTS, 8):
        order_K = cast_order(score_K, TWO_OF_FOUR, block=block)
        assert torch.equal(order_K.sort().values, torch.arange(INPUTS))
        assert torch.equal(order_K // block, torch.arange(INPUTS) // block)
        for start in range(0, INPUTS, block):
            ranks = score_K[start : start + block].argsort(descending=True).argsort()
            quantiles = (ranks // (block // 4))[order_K[start : start + block] - start]
            assert torch.equal(quantiles.view(-1, 4), torch.arange(4).expand(block // 4, -1))


def test_patterns_round_trip_and_invalid_ones_are_refused() -> None:
    assert [str(sparsity_from_text(text)) for text in ("2:4", "1:4", "4:8")] == ["2:4", "1:4", "4:8"]
    for text in ("2", "4:2", "2:2", "0:4", "8:16", "a:b", "2:4:8", "-1:4", ""):
        rejects("expected K:N", sparsity_from_text, text)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
def test_damped_covariance_is_positive_definite(eps: float) -> None:
    """The covariance has rank 1 with eigenvalues below zero, as after rounding."""
    direction_K, eye_KK = torch.arange(1.0, 9.0, dtype=torch.float64), torch.eye(8, dtype=torch.float64)
    covariance_KK = direction_K.outer(direction_K) - eps * direction_K.square().sum() * eye_KK
    damped_KK = damp(covariance_KK)
    assert float(torch.linalg.eigvalsh(damped_KK)[0]) > 0.0
    off_KK = damped_KK - covariance_KK
    torch.testing.assert_close(off_KK, off_KK.diagonal().mean() * eye_KK)
