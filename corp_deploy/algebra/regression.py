"""Fit a linear layer to a target that is not its own dense output, starting from weights that are already good.

Legend: K inputs, O outputs.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .quadratic import solve_ridge


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Second-order statistics of inputs x and targets t over the same tokens, float64, all divided by their count.

    cross_OK = E[t x'], target_square = E||t||^2; enough for the exact error of any weight and bias.
    """

    mean_K: Tensor
    second_KK: Tensor
    mean_O: Tensor
    cross_OK: Tensor
    target_square: float

    def __post_init__(self) -> None:
        shape = (self.mean_O.numel(), self.mean_K.numel())
        assert self.cross_OK.shape == shape, (self.cross_OK.shape, shape)
        assert self.target_square >= 0.0, self.target_square

    def of(self, columns_k: Tensor) -> "Regression":
        """On these inputs alone, in this order."""
        return replace(
            self,
            mean_K=self.mean_K[columns_k],
            second_KK=self.second_KK[columns_k[:, None], columns_k],
            cross_OK=self.cross_OK[:, columns_k],
        )

    def less(self, part: "Regression", share: float) -> "Regression":
        """Without a part that has this share of the tokens."""
        return Regression(
            mean_K=(self.mean_K - share * part.mean_K) / (1.0 - share),
            second_KK=(self.second_KK - share * part.second_KK) / (1.0 - share),
            mean_O=(self.mean_O - share * part.mean_O) / (1.0 - share),
            cross_OK=(self.cross_OK - share * part.cross_OK) / (1.0 - share),
            target_square=(self.target_square - share * part.target_square) / (1.0 - share),
        )

    @cached_property
    def covariance_KK(self) -> Tensor:
        return self.second_KK - torch.outer(self.mean_K, self.mean_K)

    @cached_property
    def centred_OK(self) -> Tensor:
        """Cov(t, x)."""
        return self.cross_OK - torch.outer(self.mean_O, self.mean_K)

    @cached_property
    def spread(self) -> float:
        """E||t - E t||^2."""
        return max(self.target_square - float(self.mean_O.square().sum()), 0.0)

    def error(self, weight_OK: Tensor, bias_O: Tensor) -> float:
        """E||t - W x - b||^2."""
        fitted = float(((weight_OK @ self.covariance_KK - 2.0 * self.centred_OK) * weight_OK).sum())
        shift_O = self.mean_O - weight_OK @ self.mean_K - bias_O
        return max(self.spread + fitted, 0.0) + float(shift_O.square().sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """New weight and bias; residual: E||t - W x - b||^2; residual_prior: that of the prior at its best bias."""

    weight_OK: Tensor
    bias_O: Tensor
    residual: float
    residual_prior: float
    condition: float
    ridge: float


def refit_toward(prior_OK: Tensor | None, regression: Regression, *, strength: float, bound: bool = False) -> Refit:
    """argmin E||t - W x - b||^2 + ridge ||W - prior||^2, the bias free; ridge = strength * mean diagonal of Cov(x).

    W = prior + (C_tx - prior C_xx)(C_xx + ridge I)^-1, b = mean t - W mean x; a prior of None is zero. Never worse than
    the prior on these statistics; at large strength it is the prior with its best bias. `bound`: see solve_ridge.
    """
    left_OK, residual_prior = regression.centred_OK, regression.spread
    if prior_OK is not None:
        left_OK = left_OK - prior_OK @ regression.covariance_KK
        residual_prior -= float((prior_OK * (regression.centred_OK + left_OK)).sum())
    solved = solve_ridge(left_OK, regression.covariance_KK, ridge_rel=strength, bound=bound)
    change_OK = solved.solution_OK  # change (C_xx + ridge I) = left, so its own error needs no product
    gained = float((change_OK * left_OK).sum()) + solved.ridge * float(change_OK.square().sum())
    weight_OK = change_OK if prior_OK is None else prior_OK + change_OK
    return Refit(
        weight_OK=weight_OK,
        bias_O=regression.mean_O - weight_OK @ regression.mean_K,
        residual=max(residual_prior - gained, 0.0),
        residual_prior=max(residual_prior, 0.0),
        condition=solved.condition,
        ridge=solved.ridge,
    )
