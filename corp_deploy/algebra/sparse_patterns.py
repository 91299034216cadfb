"""The choice of the k weights that stay of every n neighbouring ones of a row: k:n patterns. PURE.

The loss of a linear layer with weights W', over inputs of covariance C, is tr((W' - W) C (W' - W)') plus a constant,
where W are the best dense weights.

Legend: O rows, K inputs, G groups of n neighbours, P patterns of a group, D those of a pattern that are dropped.
"""

from itertools import combinations

import torch
from torch import Tensor

from corp_deploy.spec.sparsity import Sparsity


def saliency(weight_OK: Tensor, spread_K: Tensor) -> Tensor:
    """Return sum_o w_oj^2 Var(x_j) of each input [K]: the cost of dropping it alone."""
    return weight_OK.square().sum(dim=0) * spread_K


def cast_order(score_K: Tensor, sparsity: Sparsity, *, block: int | None = None) -> Tensor:
    """Return CAST's order of the inputs [K], in which every group of n has one input of each of n quantiles of score.

    With `block` the inputs are reordered only within blocks of that many neighbours.
    """
    blocks = score_K.view(-1, len(score_K) if block is None else block)
    assert not blocks.shape[1] % sparsity.of, (block, sparsity)
    order_BV = blocks.argsort(dim=1, descending=True, stable=True)
    order_BV = order_BV.view(len(blocks), sparsity.of, -1).transpose(1, 2).flatten(1)
    starts_B = torch.arange(len(blocks), device=score_K.device) * blocks.shape[1]
    return (order_BV + starts_B[:, None]).flatten()


def dropped_patterns(sparsity: Sparsity, device: torch.device) -> Tensor:
    """Return the positions [P,D] of the dropped weights, for every way to drop n - k of n."""
    ways = list(combinations(range(sparsity.of), sparsity.of - sparsity.kept))
    return torch.tensor(ways, dtype=torch.int64, device=device)


def holds(weight_OK: Tensor, sparsity: Sparsity) -> bool:
    """Return whether n divides the row length and at most k weights of every n neighbours in a row are not zero."""
    if weight_OK.shape[1] % sparsity.of:
        return False
    groups_Gn = weight_OK.reshape(-1, sparsity.of)
    return int((groups_Gn != 0).sum(dim=1).max()) <= sparsity.kept if len(groups_Gn) else True


def magnitude_mask(weight_OK: Tensor, sparsity: Sparsity) -> Tensor:
    """Return the boolean keep-mask [O,K] of the k largest magnitudes of every group; among equals the first."""
    groups_OGn = weight_OK.abs().unflatten(1, (-1, sparsity.of))
    order_OGn = groups_OGn.argsort(dim=-1, descending=True, stable=True)
    mask_OGn = torch.zeros_like(groups_OGn, dtype=torch.bool)
    return mask_OGn.scatter(-1, order_OGn[..., : sparsity.kept], True).flatten(1)


def cast_mask(weight_OK: Tensor, second_KK: Tensor, sparsity: Sparsity) -> Tensor:
    """Return the boolean keep-mask [O,K] of CAST (Marchenko-Pastur paper, Sec. 3), without a prior mask.

    In each group g by itself, the pattern has the least r' C_g r, where r are the weights that it drops and
    C_g = E[x_g x_g'].
    """
    size, patterns_PD = sparsity.of, dropped_patterns(sparsity, weight_OK.device)
    masks_Pn = torch.ones(len(patterns_PD), size, dtype=torch.bool, device=weight_OK.device)
    masks_Pn.scatter_(1, patterns_PD, False)
    kept = torch.empty_like(weight_OK, dtype=torch.bool)
    for start in range(0, weight_OK.shape[1], size):
        group = slice(start, start + size)
        dropped_OPn = weight_OK[:, None, group] * ~masks_Pn
        cost_OP = ((dropped_OPn @ second_KK[group, group]) * dropped_OPn).sum(dim=-1)
        kept[:, group] = masks_Pn[cost_OP.argmin(dim=1)]
    return kept


def _cheapest(weight_On: Tensor, inverse_nn: Tensor, patterns_PD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cheapest positions to drop in each row [O,D], and their multipliers [H^-1]_DD^-1 w_D [O,D].

    The cost assumes that the group's other weights and all weights behind the group are updated to compensate.
    """
    blocks_PDD = inverse_nn[patterns_PD[:, :, None], patterns_PD[:, None, :]]
    w_POD = weight_On[:, patterns_PD].transpose(0, 1)
    solved_POD = torch.linalg.solve(blocks_PDD, w_POD.mT).mT
    best_O = (w_POD * solved_POD).sum(dim=-1).argmin(dim=0)
    return patterns_PD[best_O], solved_POD[best_O, torch.arange(len(weight_On), device=weight_On.device)]


def obs_mask(weight_OK: Tensor, hessian_KK: Tensor, sparsity: Sparsity) -> Tensor:
    """Return the boolean keep-mask [O,K] in SparseGPT's column order (arXiv 2301.00774), by exact costs of dropping.

    From left to right, each row drops the D weights of a group with the least cost w_D' ([H^-1]_DD)^-1 w_D, where H is
    the Hessian of the group's columns and all columns behind it. The weights in these columns are then updated to
    compensate (optimal brain surgeon).
    `hessian_KK`: the inputs' covariance with its ridge, positive definite.
    """
    size, patterns_PD = sparsity.of, dropped_patterns(sparsity, weight_OK.device)
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(hessian_KK))
    upper_KK = torch.linalg.cholesky(inverse_KK, upper=True)  # U' U = H^-1
    weight_OK = weight_OK.clone()
    mask_OK = torch.ones_like(weight_OK, dtype=torch.bool)
    for start in range(0, weight_OK.shape[1], size):
        group = slice(start, start + size)
        upper_nX = upper_KK[group, start:]
        behind_nX = upper_nX[:, :size].T @ upper_nX  # rows of the inverse of H over the group and all behind it
        dropped_OD, multiplier_OD = _cheapest(weight_OK[:, group], behind_nX[:, :size], patterns_PD)
        spread_On = torch.zeros_like(weight_OK[:, group]).scatter_(1, dropped_OD, multiplier_OD)
        weight_OK[:, start:] -= spread_On @ behind_nX
        mask_OK[:, group] = mask_OK[:, group].scatter(1, dropped_OD, False)
    return mask_OK
