"""Orders of a layer's inputs in which its groups of n lose less: what a k:n pattern drops depends on who stands beside
whom. PURE.

Legend: O rows, K inputs, G groups of n neighbours.
"""

import torch
from torch import Tensor

from .sparsity import Sparsity


def saliency(weight_OK: Tensor, spread_K: Tensor) -> Tensor:
    """w^2 E[x^2] of every weight [O,K]: what dropping it alone costs."""
    return weight_OK.square() * spread_K


def dropped_saliency(saliency_OK: Tensor, sparsity: Sparsity) -> float:
    """What rows that keep the largest of every group drop, in all."""
    ordered_OGn = saliency_OK.unflatten(1, (-1, sparsity.of)).sort(dim=-1).values
    return float(ordered_OGn[..., : sparsity.of - sparsity.kept].sum())


def interleaved(score_K: Tensor, sparsity: Sparsity) -> Tensor:
    """CAST's order [K]: sorted by score, cut into n quantiles, and one of each in every group."""
    return score_K.argsort(descending=True, stable=True).view(sparsity.of, -1).T.flatten()


def swapped(
    saliency_OK: Tensor, sparsity: Sparsity, *, block: int | None = None, sweeps: int = 8, seed: int = 0
) -> Tensor:
    """An order [K] by greedy swaps of inputs between two groups (Pool and Yu 2021), within blocks of so many inputs.

    In a sweep every group meets others in rounds of disjoint pairs, drawn by the seed; each pair takes the one swap
    that lessens the dropped saliency most, where any does, so that it never grows.
    """
    inputs = saliency_OK.shape[1]
    block = inputs if block is None else block
    assert inputs % block == 0, (inputs, block)
    assert block % sparsity.of == 0, (block, sparsity)
    groups = block // sparsity.of
    order_K = torch.arange(inputs, device=saliency_OK.device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sweeps * max(groups // 2, 1) if groups > 1 else 0):
        pairs_P2 = _pairs(inputs // block, groups, generator).to(order_K.device)
        order_K = _with_best_swaps(saliency_OK, order_K, pairs_P2, sparsity)
    return order_K


def _pairs(blocks: int, groups: int, generator: torch.Generator) -> Tensor:
    """Disjoint pairs of groups of the same block [P,2]."""
    drawn = [torch.randperm(groups, generator=generator)[: groups // 2 * 2] + groups * block for block in range(blocks)]
    return torch.cat([each.view(-1, 2) for each in drawn])


def _with_best_swaps(saliency_OK: Tensor, order_K: Tensor, pairs_P2: Tensor, sparsity: Sparsity) -> Tensor:
    """Every pair with the one of its n x n swaps that helps most, if one does."""
    size, drop = sparsity.of, sparsity.of - sparsity.kept
    of_group_Gn = order_K.view(-1, size).clone()
    both_P2n = of_group_Gn[pairs_P2]
    values_OP2n = saliency_OK[:, both_P2n]

    def dropped(groups_OPn: Tensor) -> Tensor:
        return groups_OPn.sort(dim=-1).values[..., :drop].sum(dim=(0, -1))

    left_OPn, right_OPn = values_OP2n.unbind(dim=2)
    now_P = dropped(left_OPn) + dropped(right_OPn)
    costs: list[Tensor] = []
    for one in range(size):
        for other in range(size):
            swapped_left, swapped_right = left_OPn.clone(), right_OPn.clone()
            swapped_left[..., one], swapped_right[..., other] = right_OPn[..., other], left_OPn[..., one]
            costs.append(dropped(swapped_left) + dropped(swapped_right))
    best_P, which_P = torch.stack(costs).min(dim=0)
    helped = (best_P < now_P * (1.0 - 1e-12)).nonzero().flatten()
    one_H, other_H = which_P[helped] // size, which_P[helped] % size
    left_H, right_H = pairs_P2[helped].unbind(dim=1)
    of_group_Gn[left_H, one_H], of_group_Gn[right_H, other_H] = (
        both_P2n[helped, 1, other_H],
        both_P2n[helped, 0, one_H],
    )
    return of_group_Gn.flatten()
