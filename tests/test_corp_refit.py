"""Refits toward a prior: the closed loop's solve, against least squares on raw samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corp_deploy.algebra.regression import Regression, refit_toward


def data(seed: int, tokens: int = 80, *, noise: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets that are nearly affine in them, and a prior near the truth."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(3, 6, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    x = torch.randn(tokens, 6, generator=generator, dtype=torch.float64) + 1.0
    t = x @ truth.T + 2.0 + noise * torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    return x, t, truth + 0.5


def regression_of(x: Tensor, t: Tensor) -> Regression:
    return Regression(
        mean_K=x.mean(dim=0),
        second_KK=x.T @ x / len(x),
        mean_O=t.mean(dim=0),
        cross_OK=t.T @ x / len(x),
        target_square=float(t.square().sum(dim=1).mean()),
    )


def error_on(x: Tensor, t: Tensor, weight: Tensor, bias: Tensor) -> float:
    return float((t - x @ weight.T - bias).square().sum(dim=1).mean())


@pytest.mark.parametrize("strength", [1e-3, 0.1, 3.0])
def test_refit_minimises_its_objective(strength: float) -> None:
    x, t, prior = data(0)
    result = refit_toward(prior, regression_of(x, t), strength=strength)
    ridge = strength * float(x.var(dim=0, correction=0).mean())
    assert result.ridge == pytest.approx(ridge)
    rows = np.vstack((np.hstack((x.numpy(), np.ones((80, 1)))) / 80**0.5, ridge**0.5 * np.eye(6, 7)))
    targets = np.vstack((t.numpy() / 80**0.5, ridge**0.5 * prior.numpy().T))
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    np.testing.assert_allclose(result.weight_OK, expected[:, :6], rtol=1e-8)
    np.testing.assert_allclose(result.bias_O, expected[:, 6], rtol=1e-8)
    assert result.residual == pytest.approx(error_on(x, t, result.weight_OK, result.bias_O), rel=1e-9)


@given(seed=st.integers(0, 10_000), tokens=st.integers(1, 12), strength=st.sampled_from([0.0, 1e-6, 0.1, 1e8]))
@settings(max_examples=50, deadline=None)
def test_never_worse_than_the_prior_at_its_best_bias(seed: int, tokens: int, strength: float) -> None:
    x, t, prior = data(seed, tokens)
    result = refit_toward(prior, regression_of(x, t), strength=strength)
    best = (t - x @ prior.T).mean(dim=0)
    assert result.residual_prior == pytest.approx(error_on(x, t, prior, best), rel=1e-6, abs=1e-9)
    assert result.residual <= result.residual_prior * (1 + 1e-9) + 1e-9


def test_strength_goes_from_least_squares_to_the_prior() -> None:
    x, t, prior = data(1)
    regression = regression_of(x, t)
    torch.testing.assert_close(refit_toward(prior, regression, strength=1e12).weight_OK, prior)
    free = np.linalg.lstsq(np.hstack((x.numpy(), np.ones((80, 1)))), t.numpy(), rcond=None)[0].T
    np.testing.assert_allclose(refit_toward(prior, regression, strength=0.0).weight_OK, free[:, :6], rtol=1e-8)
