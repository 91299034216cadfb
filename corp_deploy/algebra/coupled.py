"""Backward elimination of channels that several layers read, each by its own statistics.

What removing channel j costs is summed over the readers, each one's loss as a share of the variance of what it gives:
optimal brain surgeon as in obs.py, with one inverse a reader.

Legend: R readers, C channels, M channels still in the matrices, X rows of a reader (outputs, of each place of a
kernel).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .obs import Elimination, shifted_covariance
from .quadratic import variance


def _formed(
    shifted: Sequence[Tensor], targets: Sequence[Tensor], shares: Sequence[float], here_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Inverses and Grams of the best weights on the channels that are left, [R,M,M] each."""
    inverses, norms = [], []
    for shifted_CC, target_XC, share in zip(shifted, targets, shares, strict=True):
        own_MM = shifted_CC[here_M[:, None], here_M]
        inverse_MM = torch.cholesky_inverse(torch.linalg.cholesky(own_MM))
        weight_XM = target_XC[:, here_M] @ inverse_MM
        inverses.append(inverse_MM)
        norms.append(weight_XM.T @ weight_XM * share)
    return torch.stack(inverses), torch.stack(norms)


def eliminate_coupled(covariances: Sequence[Tensor], weights: Sequence[Tensor], *, ridge_rel: float) -> Elimination:
    """Order all channels by greedy backward elimination; errors are sums of shares lost.

    covariances: of each reader, float64 [C,C]; weights: of each reader, float64 [X,C]; ridge_rel: relative to each
    covariance's mean diagonal.
    """
    told = [place for place, each in enumerate(covariances) if float(each.diagonal().sum()) > 0.0]
    if not told:  # no channel varies for any reader: biases take them all
        every_C = torch.arange(len(covariances[0]), device=covariances[0].device)
        return Elimination(order_F=every_C, error_F=torch.zeros_like(every_C, dtype=torch.float64), ridge=0.0)
    covariances, weights = [covariances[place] for place in told], [weights[place] for place in told]
    shifted = [shifted_covariance(covariance_CC, ridge_rel) for covariance_CC in covariances]
    energies = [variance(weight_XC, own) for weight_XC, own in zip(weights, covariances, strict=True)]
    shares = [1.0 / energy if energy > 0.0 else 0.0 for energy in energies]
    matrices = [each.matrix_FF for each in shifted]
    targets = [weight_XC @ own_CC for weight_XC, own_CC in zip(weights, matrices, strict=True)]
    here_M = torch.arange(len(covariances[0]), device=covariances[0].device)
    order: list[Tensor] = []
    costs: list[Tensor] = []
    while len(here_M):
        inverses_RMM, norms_RMM = _formed(matrices, targets, shares, here_M)
        gone_M = torch.zeros(len(here_M), dtype=torch.bool, device=here_M.device)
        # Formed anew at each halving, so that rounding never piles up.
        for _ in range(max(len(here_M) - len(here_M) // 2, 1)):
            pick, cost = _remove(inverses_RMM, norms_RMM, gone_M)
            order.append(here_M[pick])
            costs.append(cost)
        here_M = here_M[~gone_M]
    error_C = torch.stack(costs).cumsum(0)
    return Elimination(order_F=torch.stack(order), error_F=error_C, ridge=max(each.ridge for each in shifted))


def _remove(inverses_RMM: Tensor, norms_RMM: Tensor, gone_M: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest channel and what it costs; the matrices and the mask are brought up to date in place."""
    inverse_RM = inverses_RMM.diagonal(dim1=1, dim2=2)
    norm_RM = norms_RMM.diagonal(dim1=1, dim2=2).clamp_min(0.0)
    cost_M = (norm_RM / torch.where(gone_M, 1.0, inverse_RM)).sum(dim=0).masked_fill(gone_M, torch.inf)
    pick = cost_M.argmin()
    h_RM, n_RM = inverses_RMM[:, pick].clone(), norms_RMM[:, pick].clone()
    pivot_R1 = h_RM[:, pick, None].clone()
    k_RM = h_RM / pivot_R1
    inverses_RMM.baddbmm_(h_RM[:, :, None], k_RM[:, None, :], alpha=-1.0)
    left_RM = n_RM - 0.5 * n_RM[:, pick, None] * k_RM
    norms_RMM.baddbmm_(left_RM[:, :, None], k_RM[:, None, :], alpha=-1.0)
    norms_RMM.baddbmm_(k_RM[:, :, None], left_RM[:, None, :], alpha=-1.0)
    gone_M[pick] = True
    inverses_RMM[:, pick] = inverses_RMM[:, :, pick] = 0.0
    norms_RMM[:, pick] = norms_RMM[:, :, pick] = 0.0
    return pick, cost_M[pick]
