"""The choice of a linear layer's sparsity pattern, and the refit of each row's kept weights by least squares. PURE.

Legend: O rows, K inputs, S kept weights of a row, X rows of one solve.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from corp_deploy.spec.sparsity import Rule, Sparsity

from .quadratic import pseudo_solve
from .regression import Regression
from .sparse_patterns import cast_mask, magnitude_mask, obs_mask

_SINGULAR = 1e-12  # pivots below this share of a row's largest count as zero
_AT_ONCE = 2**24  # numbers in the systems of one solve: 128 MB
PATTERN_DAMP = 1e-2  # of the mean diagonal, as in SparseGPT; only the choice of patterns uses it


@dataclass(frozen=True, kw_only=True)
class Objective:
    """E||t - W x - b||^2 + ridge ||W - dense||^2 of a layer, its bias free, or 0 where `fits_bias` is false.

    On any support its minimum solves w_S A_SS = T_S, with A = C_xx + ridge I and T = C_tx + ridge dense; without a bias
    second moments replace covariances. `ridge_rel` is relative to the mean diagonal of C_xx.
    """

    regression: Regression
    dense_OK: Tensor
    ridge_rel: float
    fits_bias: bool = True

    @cached_property
    def inputs_KK(self) -> Tensor:
        """The covariance of the inputs, C_xx, or their second moments without a bias."""
        return self.regression.covariance_KK if self.fits_bias else self.regression.second_KK

    @cached_property
    def ridge(self) -> float:
        return self.ridge_rel * max(float(self.inputs_KK.diagonal().mean()), 0.0)

    @cached_property
    def system_KK(self) -> Tensor:
        """The matrix A of the solves."""
        system_KK = self.inputs_KK.clone()
        system_KK.diagonal().add_(self.ridge)
        return system_KK

    @cached_property
    def right_OK(self) -> Tensor:
        """The right-hand sides T."""
        cross_OK = self.regression.centred_OK if self.fits_bias else self.regression.cross_OK
        return cross_OK + self.ridge * self.dense_OK

    def bias_of(self, weight_OK: Tensor) -> Tensor:
        if not self.fits_bias:
            return torch.zeros_like(self.regression.mean_O)
        return self.regression.mean_O - weight_OK @ self.regression.mean_K


def _is_singular(factor_XSS: Tensor, info_X: Tensor) -> Tensor:
    """Return a mask [X], true for systems that Cholesky found singular to working precision."""
    pivots_XS = factor_XSS.diagonal(dim1=-2, dim2=-1).square()
    return (info_X != 0) | ~(pivots_XS.amin(dim=-1) > _SINGULAR * pivots_XS.amax(dim=-1))


def _solve_rows(right_XS: Tensor, system_XSS: Tensor) -> Tensor:
    """Solve each row's own system by Cholesky; where it is singular, by the least-squares solution of least norm."""
    factor_XSS, info_X = torch.linalg.cholesky_ex(system_XSS)
    solved_XS = torch.cholesky_solve(right_XS.unsqueeze(-1), factor_XSS).squeeze(-1)
    for row in _is_singular(factor_XSS, info_X).nonzero().flatten().tolist():
        solved_XS[row] = pseudo_solve(right_XS[row : row + 1], system_XSS[row])[0][0]
    return solved_XS


def refit_on_support(right_OK: Tensor, system_KK: Tensor, mask_OK: Tensor, start_OK: Tensor) -> Tensor:
    """Solve w_S A_SS = T_S row by row, zeros elsewhere, float64; every row keeps the same number of weights.

    S are the weights that `mask_OK` keeps. Where A_SS is singular, the solution is the one closest to `start_OK`. Rows
    with the same support share a Cholesky factor; others are solved in batches, with S^3 / 3 multiply-adds each.
    """
    supports_PK, which_O = torch.unique(mask_OK, dim=0, return_inverse=True)
    kept = int(supports_PK[0].sum()) if len(supports_PK) else 0
    assert bool((supports_PK.sum(dim=1) == kept).all()), "rows keep different numbers of weights"
    new_OK = torch.zeros_like(right_OK)
    if not kept:
        return new_OK
    residual_OK = right_OK - (start_OK * mask_OK) @ system_KK
    each = max(1, _AT_ONCE // kept**2)
    if len(supports_PK) < len(mask_OK) // 2:
        for number, support_K in enumerate(supports_PK):
            kept_S, rows_X = support_K.nonzero().flatten(), (which_O == number).nonzero().flatten()
            system_SS, right_XS = system_KK[kept_S[:, None], kept_S], residual_OK[rows_X[:, None], kept_S]
            factor_SS, info = torch.linalg.cholesky_ex(system_SS)
            is_singular = bool(_is_singular(factor_SS, info))
            solved_SX = torch.cholesky_solve(right_XS.T, factor_SS)
            new_OK[rows_X[:, None], kept_S] = pseudo_solve(right_XS, system_SS)[0] if is_singular else solved_SX.T
    else:
        kept_OS = mask_OK.nonzero()[:, 1].view(-1, kept)
        for rows_X in torch.arange(len(mask_OK), device=mask_OK.device).split(each):
            kept_XS = kept_OS[rows_X]
            system_XSS = system_KK[kept_XS[:, :, None], kept_XS[:, None, :]]
            new_OK[rows_X[:, None], kept_XS] = _solve_rows(residual_OK[rows_X[:, None], kept_XS], system_XSS)
    return new_OK + start_OK * mask_OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Sparse weights, and errors E||t - W x - b||^2.

    `error_dense` is the error of the dense weights, `error_masked` that of the kept ones unchanged, and `error` that
    after the refit. `energy`: the target's variance, or its mean square if the layer has no bias.
    """

    weight_OK: Tensor
    bias_O: Tensor
    energy: float
    error_dense: float
    error_masked: float
    error: float


def best_dense(objective: Objective) -> Tensor:
    """Return W with W A = T: the objective's minimum without zeros; the dense weights where A is singular."""
    factor_KK, info = torch.linalg.cholesky_ex(objective.system_KK)
    if int(info) != 0:
        return objective.dense_OK
    return torch.cholesky_solve(objective.right_OK.T, factor_KK).T


def damp(system_KK: Tensor) -> Tensor:
    """Add PATTERN_DAMP * its mean diagonal to a matrix's diagonal, or 1 if that is 0, to make it positive definite.

    The addition is raised tenfold until that succeeds. Covariances of inputs with a mean far larger than their
    deviation need more, because of rounding.
    """
    mean = max(float(system_KK.diagonal().mean()), 0.0)
    damp = PATTERN_DAMP * mean if mean > 0.0 else 1.0
    while True:
        damped_KK = system_KK.clone()
        damped_KK.diagonal().add_(damp)
        if not int(torch.linalg.cholesky_ex(damped_KK).info) or not bool(damped_KK.isfinite().all()):
            return damped_KK
        damp *= 10.0


def sparse_layer(
    objective: Objective, dense_bias_O: Tensor, sparsity: Sparsity, rule: Rule, *, refits: bool = True
) -> Sparse:
    """Choose the pattern by a rule, then refit the kept weights; the error never exceeds that without the refit.

    Without `refits` the kept weights keep their values.
    """
    if rule == "magnitude":
        mask_OK = magnitude_mask(objective.dense_OK, sparsity)
    elif rule == "cast":
        mask_OK = cast_mask(objective.dense_OK, objective.regression.second_KK, sparsity)
    else:
        mask_OK = obs_mask(best_dense(objective), damp(objective.inputs_KK), sparsity)
    return refit_mask(objective, dense_bias_O, mask_OK, refits=refits)


def refit_mask(objective: Objective, dense_bias_O: Tensor, mask_OK: Tensor, *, refits: bool = True) -> Sparse:
    """Return the layer with the kept weights of `mask_OK` refitted, or unchanged without `refits`, and its errors.

    The refit minimises error plus penalty exactly. The kept dense weights have the least penalty, so the error without
    the penalty is never above theirs either.
    """
    masked_OK, error = objective.dense_OK * mask_OK, objective.regression.error
    weight_OK, bias_O = masked_OK, dense_bias_O
    if refits:
        weight_OK = refit_on_support(objective.right_OK, objective.system_KK, mask_OK, masked_OK)
        bias_O = objective.bias_of(weight_OK)
    return Sparse(
        weight_OK=weight_OK,
        bias_O=bias_O,
        energy=objective.regression.spread if objective.fits_bias else objective.regression.target_square,
        error_dense=error(objective.dense_OK, dense_bias_O),
        error_masked=error(masked_OK, dense_bias_O),
        error=error(weight_OK, bias_O),
    )
