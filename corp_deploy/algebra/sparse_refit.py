"""The least-squares refit of a linear layer's weights, each row on its own support. PURE.

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
        """The system A."""
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
    """Return whether Cholesky found each system singular to working precision."""
    pivots_XS = factor_XSS.diagonal(dim1=-2, dim2=-1).square()
    return (info_X != 0) | ~(pivots_XS.amin(dim=-1) > _SINGULAR * pivots_XS.amax(dim=-1))


def _solve_rows(right_XS: Tensor, system_XSS: Tensor) -> Tensor:
    """Solve each row by Cholesky; a row whose system is singular to working precision takes the shortest solution."""
    factor_XSS, info_X = torch.linalg.cholesky_ex(system_XSS)
    solved_XS = torch.cholesky_solve(right_XS.unsqueeze(-1), factor_XSS).squeeze(-1)
    for row in _is_singular(factor_XSS, info_X).nonzero().flatten().tolist():
        solved_XS[row] = pseudo_solve(right_XS[row : row + 1], system_XSS[row])[0][0]
    return solved_XS


def refit_on_support(right_OK: Tensor, system_KK: Tensor, mask_OK: Tensor, start_OK: Tensor) -> Tensor:
    """Solve w_S A_SS = T_S row by row, zeros elsewhere, float64; every row keeps the same number of weights.

    Where A_SS is singular, the solution is the one that changes the start's weights there least. Rows with the same
    support share a factor; others are solved in batches, S^3 / 3 multiply-adds each.
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
    """Weights with their zeros, and their errors E||t - W x - b||^2.

    The errors are those of the dense weights, of the kept weights unchanged (`error_masked`), and of the refit.
    `energy`: of the target about its mean, or about 0 without a bias.
    """

    weight_OK: Tensor
    bias_O: Tensor
    mask_OK: Tensor
    energy: float
    error_dense: float
    error_masked: float
    error: float
    ridge: float


def best_dense(objective: Objective) -> Tensor:
    """Return W with W A = T: the objective's minimum without zeros; the dense weights where A is singular."""
    factor_KK, info = torch.linalg.cholesky_ex(objective.system_KK)
    if int(info) != 0:
        return objective.dense_OK
    return torch.cholesky_solve(objective.right_OK.T, factor_KK).T


def damp(system_KK: Tensor) -> Tensor:
    """Add PATTERN_DAMP of its mean diagonal to a matrix, or 1 where that is 0, so that it is positive definite.

    The damping grows tenfold while that isn't enough, as for covariances that rounding made of inputs far from zero
    compared with their deviations.
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
    """Choose the pattern by a rule, then refit on it exactly; never worse than the kept dense weights.

    Without `refits` those are left unchanged.
    """
    if rule == "magnitude":
        mask_OK = magnitude_mask(objective.dense_OK, sparsity)
    elif rule == "cast":
        mask_OK = cast_mask(objective.dense_OK, objective.regression.second_KK, sparsity)
    else:
        mask_OK = obs_mask(best_dense(objective), damp(objective.inputs_KK), sparsity)
    return refit_mask(objective, dense_bias_O, mask_OK, refits=refits)


def refit_mask(objective: Objective, dense_bias_O: Tensor, mask_OK: Tensor, *, refits: bool = True) -> Sparse:
    """Refit on the supports of a mask.

    The refit is exact, so its penalised error is least; the kept dense weights have no penalty, so the error alone is
    never above theirs either.
    """
    masked_OK, error = objective.dense_OK * mask_OK, objective.regression.error
    weight_OK, bias_O = masked_OK, dense_bias_O
    if refits:
        weight_OK = refit_on_support(objective.right_OK, objective.system_KK, mask_OK, masked_OK)
        bias_O = objective.bias_of(weight_OK)
    return Sparse(
        weight_OK=weight_OK,
        bias_O=bias_O,
        mask_OK=mask_OK,
        energy=objective.regression.spread if objective.fits_bias else objective.regression.target_square,
        error_dense=error(objective.dense_OK, dense_bias_O),
        error_masked=error(masked_OK, dense_bias_O),
        error=error(weight_OK, bias_O),
        ridge=objective.ridge,
    )
