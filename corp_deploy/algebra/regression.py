"""Linear layers fitted by ridge regression to any target, toward prior weights, and the sums over tokens for the fit.

Products over tokens are computed in float32 and summed in float64; sums over several sets of tokens can be added.

Legend: B images, N tokens, n tokens of one product, K inputs, R kept inputs, O outputs.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from calib.products import add_gram_, mirror_

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
        """Return the statistics of these inputs alone, in this order."""
        return replace(
            self,
            mean_K=self.mean_K[columns_k],
            second_KK=self.second_KK[columns_k[:, None], columns_k],
            cross_OK=self.cross_OK[:, columns_k],
        )

    def less(self, part: "Regression", share: float) -> "Regression":
        """Return the statistics of the other tokens, given those of a `part` that is this share of the tokens."""
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
        """The covariance of targets and inputs."""
        return self.cross_OK - torch.outer(self.mean_O, self.mean_K)

    @cached_property
    def spread(self) -> float:
        """The variance of the targets, E||t - E t||^2."""
        return max(self.target_square - float(self.mean_O.square().sum()), 0.0)

    def error(self, weight_OK: Tensor, bias_O: Tensor) -> float:
        """Return E||t - W x - b||^2."""
        fitted = float(((weight_OK @ self.covariance_KK - 2.0 * self.centred_OK) * weight_OK).sum())
        shift_O = self.mean_O - weight_OK @ self.mean_K - bias_O
        return max(self.spread + fitted, 0.0) + float(shift_O.square().sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """New weight and bias; residual: E||t - W x - b||^2; residual_prior: that of the prior at the best bias."""

    weight_OK: Tensor
    bias_O: Tensor
    residual: float
    residual_prior: float
    condition: float
    ridge: float


def refit_toward(prior_OK: Tensor | None, regression: Regression, *, strength: float, bound: bool = False) -> Refit:
    """Minimise E||t - W x - b||^2 + ridge ||W - prior||^2, the bias free; ridge = strength * mean diagonal of Cov(x).

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


PRODUCT_TOKENS = 2048  # a float32 sum of that many terms is accurate to about 1e-6 of its scale


def _zeros(*shape: int, device: torch.device | str) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=device)


def _weighted(x_BNK: Tensor, weights_BN: Tensor | None) -> Tensor:
    return x_BNK if weights_BN is None else x_BNK * weights_BN.unsqueeze(-1)


@dataclass(slots=True, kw_only=True)
class Gram:
    """The sum of the tokens' weights, and the weighted sums of x and of the upper triangle of x x'."""

    tokens: float
    sum_K: Tensor
    upper_KK: Tensor

    @classmethod
    def empty(cls, width: int, device: torch.device | str = "cpu") -> Self:
        return cls(tokens=0, sum_K=_zeros(width, device=device), upper_KK=_zeros(width, width, device=device))

    def add(self, x_BNK: Tensor, weights_BN: Tensor | None = None) -> None:
        """Add every token of these images by its weight; None weights all by 1."""
        rooted_BNK = x_BNK if weights_BN is None else x_BNK * weights_BN.sqrt().unsqueeze(-1)
        add_gram_(self.upper_KK, rooted_BNK.flatten(0, 1).unsqueeze(0))
        self.sum_K.add_(_weighted(x_BNK, weights_BN).sum(dim=1).double().sum(dim=0))
        self.tokens += x_BNK.shape[:2].numel() if weights_BN is None else float(weights_BN.double().sum())

    @property
    def gram_KK(self) -> Tensor:
        """The weighted sum of x x', both triangles."""
        mirror_(self.upper_KK)
        return self.upper_KK

    def with_those_of(self, other: "Gram") -> "Gram":
        """Return the sums over both sets of tokens."""
        tokens, sum_K = self.tokens + other.tokens, self.sum_K + other.sum_K
        return Gram(tokens=tokens, sum_K=sum_K, upper_KK=self.gram_KK + other.gram_KK)

    def of(self, kept_R: Tensor) -> "Gram":
        """Return the sums of the inputs `kept_R` alone."""
        return Gram(tokens=self.tokens, sum_K=self.sum_K[kept_R], upper_KK=self.gram_KK[kept_R[:, None], kept_R])


@dataclass(slots=True, kw_only=True)
class RegressionSums:
    """Sums over tokens of inputs x, targets t and their products.

    They also give the regression on some of the inputs, or on the target minus the output of a map, without another
    pass over the images.
    """

    x: Gram
    t_O: Tensor
    tx_OK: Tensor
    tt: Tensor

    @classmethod
    def empty(cls, *, inputs: int, outputs: int, device: torch.device | str = "cpu") -> Self:
        return cls(
            x=Gram.empty(inputs, device),
            t_O=_zeros(outputs, device=device),
            tx_OK=_zeros(outputs, inputs, device=device),
            tt=_zeros(device=device),
        )

    def add(self, x_BNK: Tensor, t_BNO: Tensor, weights_BN: Tensor | None = None) -> None:
        """Add every token of these images by its weight; None weights all by 1."""
        weighted_BNO = _weighted(t_BNO, weights_BN)
        x_XK, t_XO = x_BNK.flatten(0, 1), weighted_BNO.flatten(0, 1)
        self.x.add(x_BNK, weights_BN)
        for x_nK, t_nO in zip(x_XK.split(PRODUCT_TOKENS), t_XO.split(PRODUCT_TOKENS), strict=True):
            self.tx_OK.add_(t_nO.float().T @ x_nK.float())
        self.t_O.add_(weighted_BNO.sum(dim=1).double().sum(dim=0))
        self.tt.add_(torch.linalg.vecdot(t_XO, t_BNO.flatten(0, 1)).double().sum())

    def with_those_of(self, other: "RegressionSums") -> "RegressionSums":
        """Return the sums over both sets of tokens."""
        return RegressionSums(
            x=self.x.with_those_of(other.x),
            t_O=self.t_O + other.t_O,
            tx_OK=self.tx_OK + other.tx_OK,
            tt=self.tt + other.tt,
        )

    def of(self, kept_R: Tensor) -> "RegressionSums":
        """Return the sums with the inputs `kept_R` alone."""
        return RegressionSums(x=self.x.of(kept_R), t_O=self.t_O, tx_OK=self.tx_OK[:, kept_R], tt=self.tt)

    def uncentred(self) -> "RegressionSums":
        """Return the sums with means of zero, second moments as they are.

        A layer without a bias can't restore the mean of what is lost. A fit on such sums is the best one without a
        bias, and its residual includes the mean.
        """
        x = Gram(tokens=self.x.tokens, sum_K=torch.zeros_like(self.x.sum_K), upper_KK=self.x.upper_KK)
        return RegressionSums(x=x, t_O=torch.zeros_like(self.t_O), tx_OK=self.tx_OK, tt=self.tt)

    def less(self, weight_OK: Tensor, bias_O: Tensor) -> "RegressionSums":
        """Return the sums in which the targets are t - W x - b."""
        mapped_OK = weight_OK @ self.x.gram_KK + torch.outer(bias_O, self.x.sum_K)
        return RegressionSums(
            x=self.x,
            t_O=self.t_O - weight_OK @ self.x.sum_K - bias_O * self.x.tokens,
            tx_OK=self.tx_OK - mapped_OK,
            tt=torch.full_like(self.tt, self.regression().error(weight_OK, bias_O) * self.x.tokens),
        )

    def regression(self) -> Regression:
        """Return the statistics: every sum divided by the weight of all tokens."""
        tokens = self.x.tokens
        assert tokens > 0, tokens
        return Regression(
            mean_K=self.x.sum_K / tokens,
            second_KK=self.x.gram_KK / tokens,
            mean_O=self.t_O / tokens,
            cross_OK=self.tx_OK / tokens,
            target_square=float(self.tt) / tokens,
        )
