"""Ridge solves of recoveries, errors of changed linear layers, and a mean predicted from some of its numbers.

Legend: F inputs, O outputs, K unknowns per output.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_STRENGTHS = tuple(10.0**power for power in range(-10, 5))
_CUTOFF_REL = 1e-12  # eigenvalues below this share of the largest count as zero in the fall-back


@dataclass(frozen=True, slots=True, kw_only=True)
class RidgeSolution:
    """The solution X of X (gram + ridge I) = cross, and the condition number of gram + ridge I.

    The condition is that of the 1-norm, an upper bound, or after an eigendecomposition that of the 2-norm, at most
    1/eps. The defaults are those of weights that nothing was solved for.
    """

    solution_OK: Tensor
    condition: float = 1.0
    ridge: float = 0.0

    def __post_init__(self) -> None:
        assert self.ridge >= 0.0, self.ridge


def pseudo_solve(cross_OK: Tensor, gram_KK: Tensor) -> tuple[Tensor, float]:
    """Return the least-squares solution X of X gram = cross with the least norm, and the 2-norm condition of gram."""
    values_K, vectors_KK = torch.linalg.eigh(gram_KK)
    largest = values_K[-1].clamp_min(torch.finfo(values_K.dtype).tiny)
    inverse_K = torch.where(values_K > _CUTOFF_REL * largest, 1.0 / values_K, 0.0)
    worst = values_K[0].clamp_min(torch.finfo(values_K.dtype).eps * largest)
    return ((cross_OK @ vectors_KK) * inverse_K) @ vectors_KK.T, float(largest / worst)


def solve_ridge(cross_OK: Tensor, gram_KK: Tensor, *, ridge_rel: float, bound: bool = False) -> RidgeSolution:
    """Solve X (gram + ridge I) = cross in float64, ridge = ridge_rel * mean diagonal of gram.

    The solver is Cholesky. Where the matrix is singular to working precision (condition above 1e12), eigenvalues under
    1e-12 of the largest are dropped: the solution is the shortest of the least-squares solutions. K may be 0. With
    `bound` an upper bound, which follows from the ridge, is returned as the condition if it is below 1e12; computing
    the condition itself takes an inverse.
    """
    assert ridge_rel >= 0.0, ridge_rel
    if not gram_KK.numel():
        return RidgeSolution(solution_OK=cross_OK.clone())
    ridge = ridge_rel * max(float(gram_KK.diagonal().mean()), 0.0)  # rounding can leave a negative mean of constants
    matrix_KK = gram_KK.clone()
    matrix_KK.diagonal().add_(ridge)
    factor_KK, info = torch.linalg.cholesky_ex(matrix_KK)
    if int(info) == 0:
        # No eigenvalue of gram is above its trace, width / ridge_rel times the ridge.
        condition = len(gram_KK) * (1.0 + len(gram_KK) / ridge_rel) if bound and ridge_rel > 0.0 else math.inf
        if condition * _CUTOFF_REL >= 1.0:
            norm = torch.linalg.matrix_norm(matrix_KK, ord=1)
            condition = max(float(norm * torch.linalg.matrix_norm(torch.cholesky_inverse(factor_KK), ord=1)), 1.0)
        if condition * _CUTOFF_REL < 1.0:
            solution_OK = torch.cholesky_solve(cross_OK.T, factor_KK).T
            return RidgeSolution(solution_OK=solution_OK, condition=condition, ridge=ridge)
    solution_OK, condition = pseudo_solve(cross_OK, matrix_KK)
    return RidgeSolution(solution_OK=solution_OK, condition=condition, ridge=ridge)


def solve_ridge_toward(
    start_OK: Tensor, weight_OC: Tensor, moment_CC: Tensor, map_KC: Tensor, *, ridge_rel: float
) -> RidgeSolution:
    """Return S + (W - S R) G R' (R G R' + ridge I)^-1: weights that read R z in place of z, by a ridge toward S.

    R is the map, G = E[z z'] or the covariance, S the start and W the weights that read z.
    """
    spread_CK = moment_CC @ map_KC.T
    step = solve_ridge((weight_OC - start_OK @ map_KC) @ spread_CK, map_KC @ spread_CK, ridge_rel=ridge_rel)
    return replace(step, solution_OK=start_OK + step.solution_OK)


def variance(weight_OF: Tensor, covariance_FF: Tensor) -> float:
    """Return tr(W C W'), never below zero by rounding: the variance of W x, or E||W x||^2 for a second moment C."""
    return max(float(((weight_OF @ covariance_FF) * weight_OF).sum()), 0.0)


def explained(left: float, lost: float) -> float:
    """Return 1 - left / lost: the share of a loss that a fit removes; 1 if nothing is lost."""
    return 1.0 - left / lost if lost > 0.0 else 1.0


def output_error(mean_F: Tensor, second_FF: Tensor, change_OF: Tensor, bias_change_O: Tensor) -> float:
    """Return E||D x + d||^2 = tr(D C D') + ||D mu + d||^2 for weights that change by D and a bias by d."""
    covariance_FF = second_FF - torch.outer(mean_F, mean_F)
    return variance(change_OF, covariance_FF) + float((change_OF @ mean_F + bias_change_O).square().sum())


def floored_roots(moment_HVV: Tensor, floor_rel: float) -> tuple[Tensor, Tensor]:
    """Return the roots [H,V] of the eigenvalues, raised to floor_rel * their mean, and the eigenvectors [H,V,V]."""
    value_HV, basis_HVV = torch.linalg.eigh(moment_HVV)
    floor_H1 = (floor_rel * value_HV.mean(dim=1, keepdim=True)).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.maximum(value_HV, floor_H1).sqrt(), basis_HVV


def diagonal_blocks(matrix_CC: Tensor, count: int) -> Tensor:
    """Return the `count` blocks on the diagonal [count, V, V] of a matrix [C, C]."""
    apart: Tensor = matrix_CC.unflatten(1, (count, -1)).unflatten(0, (count, -1))
    return apart.diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def mean_from_kept(second_FF: Tensor, weight_F: Tensor, kept_K: Tensor) -> Tensor:
    """Return weights [K] that predict a weighted mean w'g of F positive numbers from some of them, g_S, given E[g g'].

    There is no offset, so that the prediction scales with g. If the kept numbers were in a fixed proportion to the
    rest, c0 = kappa w_S would be exact, with kappa = E[w'g w_S'g_S] / E[(w_S'g_S)^2]. The regression is pulled toward
    c0, argmin E(w'g - c'g_S)^2 + ridge |c - c0|^2, by the weakest ridge that leaves no weight below zero, because a
    norm divides by the mean and the mean must not come near zero. Float64.
    """
    kept_weight_K = weight_F[kept_K]
    gram_KK, cross_K = second_FF[kept_K[:, None], kept_K], second_FF[kept_K] @ weight_F
    square = (kept_weight_K @ gram_KK @ kept_weight_K).clamp_min(torch.finfo(gram_KK.dtype).tiny)
    start_K: Tensor = (kept_weight_K @ cross_K / square) * kept_weight_K
    values_K, vectors_KK = torch.linalg.eigh(gram_KK)
    left_K = vectors_KK.T @ (cross_K - gram_KK @ start_K)
    for strength in _STRENGTHS:
        ridge = strength * gram_KK.diagonal().mean()
        weight_K: Tensor = start_K + vectors_KK @ (left_K / (values_K.clamp_min(0.0) + ridge))
        if bool(torch.isfinite(weight_K).all()) and bool((weight_K >= 0.0).all()):
            return weight_K
    return start_K
