"""CORP's per-image system (eq. 15): products of the Grams of q and k, summed over images.

It gives the least-squares fit of missing logits for any kept set of dimensions among those that it covers.

Legend: H heads, D dimensions of a head, S covered by the system, R kept of them, T = S(S+1)/2 pairs (a <= b, row by
row).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSystem:
    """The sums of eq. 15 over the dimensions covered_HS[h], ascending.

    system_HTT[h] is the sum over images of half(K'K) half(Q'Q)': the upper triangles as vectors, nothing scaled.
    Dimensions P that are not covered enter two sums: target_HSS = (Q_S'Q_P)(K_P'K_S) and energy_H = ||Q_P K_P'||^2.
    These give the exact system of every kept set inside the covered one.
    """

    head_dim: int
    covered_HS: Tensor
    system_HTT: Tensor
    target_HSS: Tensor
    energy_H: Tensor

    def __post_init__(self) -> None:
        heads, width = self.covered_HS.shape
        pairs = width * (width + 1) // 2
        assert self.system_HTT.shape == (heads, pairs, pairs), (self.system_HTT.shape, self.covered_HS.shape)
        assert self.target_HSS.shape == (heads, width, width), (self.target_HSS.shape, self.covered_HS.shape)
        assert self.energy_H.shape == (heads,), self.energy_H.shape

    def covers(self, map_HRD: Tensor) -> bool:
        outside_HD = torch.ones(len(map_HRD), self.head_dim, dtype=torch.bool, device=map_HRD.device)
        outside_HD.scatter_(1, self.covered_HS, value=False)
        return not bool((map_HRD.ne(0.0).any(dim=1) & outside_HD).any())


def whole_system(system_HTT: Tensor, head_dim: int) -> ImageSystem:
    heads = len(system_HTT)
    return ImageSystem(
        head_dim=head_dim,
        covered_HS=torch.arange(head_dim, device=system_HTT.device).expand(heads, head_dim),
        system_HTT=system_HTT,
        target_HSS=system_HTT.new_zeros(heads, head_dim, head_dim),
        energy_H=system_HTT.new_zeros(heads),
    )


def pair_index(width: int, device: torch.device) -> Tensor:
    """Return the position of each pair {a, b} among the T pairs [S, S]."""
    rows, columns = torch.triu_indices(width, width, device=device)
    index_SS = torch.empty(width, width, dtype=torch.int64, device=device)
    index_SS[rows, columns] = index_SS[columns, rows] = torch.arange(rows.numel(), device=device)
    return index_SS


def _quadratic(system_TT: Tensor, lost_SS: Tensor) -> Tensor:
    """Return the sum over images of ||Q_S E K_S'||_F^2 for E = `lost_SS`, from one head's system."""
    first, second = torch.triu_indices(len(lost_SS), len(lost_SS), device=system_TT.device)
    share_T = torch.where(first == second, 0.5, 1.0).to(torch.float64)
    k_q_SS = lost_SS.T
    one_TT = k_q_SS[first[:, None], first] * k_q_SS[second[:, None], second]
    two_TT = k_q_SS[first[:, None], second] * k_q_SS[second[:, None], first]
    return (system_TT * (2.0 * torch.outer(share_T, share_T)) * (one_TT + two_TT)).sum()


def lost_per_image(system: ImageSystem, lost_HDD: Tensor) -> Tensor:
    """Return the sum over images of ||Q E K'||_F^2 for E = `lost_HDD` [H]; O(T^2) per head.

    E must be the identity outside the covered dimensions S. With P the others, the sum is over
    ||Q_S E_S K_S'||^2 + 2 <E_S, (Q_S'Q_P)(K_P'K_S)> + ||Q_P K_P'||^2.
    """
    out = []
    for head, covered_S in enumerate(system.covered_HS):
        lost_SS = lost_HDD[head][covered_S[:, None], covered_S]
        across = 2.0 * (lost_SS * system.target_HSS[head]).sum()
        out.append(_quadratic(system.system_HTT[head], lost_SS) + across + system.energy_H[head])
    return torch.stack(out).clamp_min(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitSystem:
    """The system of eq. 15 for one head and kept set: G [RR,RR] and h [RR], of vec(M) column by column.

    missing: the sum over images of the squared logits of the dimensions that are not kept.
    """

    gram: Tensor
    cross: Tensor
    missing: float


def logit_system(system: ImageSystem, head: int, kept_R: Tensor) -> LogitSystem:
    """Select eq. 15's system of a kept set inside the covered one, by index arithmetic only."""
    covered_S, system_TT, target_SS = system.covered_HS[head], system.system_HTT[head], system.target_HSS[head]
    is_kept_S = torch.isin(covered_S, kept_R)
    assert int(is_kept_S.sum()) == kept_R.numel(), (kept_R, covered_S)
    at_R, at_P = is_kept_S.nonzero().squeeze(1), (~is_kept_S).nonzero().squeeze(1)
    pair_SS = pair_index(len(covered_S), system_TT.device)
    width = kept_R.numel()
    inside = pair_SS[at_R[:, None], at_R].flatten()
    # [j, j', i, i'] -> [(j, i), (j', i')]: key index outer, query index inner
    gram = system_TT[inside[:, None], inside].view(width, width, width, width).permute(0, 2, 1, 3)
    across_RP = pair_SS[at_R[:, None], at_P]
    cross_RR = system_TT[across_RP[:, None, :], across_RP[None, :, :]].sum(dim=-1) + target_SS.T[at_R[:, None], at_R]
    outside = pair_SS[at_P[:, None], at_P].flatten()
    missing = system_TT[outside, outside].sum() + 2.0 * target_SS.diagonal()[at_P].sum() + system.energy_H[head]
    return LogitSystem(
        gram=gram.reshape(width * width, width * width), cross=cross_RR.flatten(), missing=float(missing)
    )
