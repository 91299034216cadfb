"""Exchanges of one kept channel for one pruned channel, while they lower the loss that obs.py eliminates by.

Everything about a kept set S is in two symmetric matrices over all channels. With A = covariance + ridge I,
H = A_SS^-1 and V = [best weights on S | what is left of the pruned columns]:

    T = [ -H        H A_SP                 ]        N = V'V
        [ A_PS H    A_PP - A_PS H A_SP     ]

Moving a channel p in or out of S is one pivot: T - T_pp t t' and V - V_p t' with t = T_p / T_pp but t_p = 1 - 1/|T_pp|,
after which T_pp alone needs a constant taken off. Pivots stay vectors for a block and are applied in one product.

Legend: F channels, O outputs, K kept, P pruned, B pivots in a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .obs import dead_channels, shifted_covariance

_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """A kept set after exchanges, with the ridge objective (see Elimination) before and after."""

    kept_K: Tensor
    swaps: int
    error_before: float
    error: float

    def __post_init__(self) -> None:
        assert self.error <= self.error_before, (self.error, self.error_before)


class _Swept:
    """T and N of a kept set, with the pivots of the block at hand not yet applied to the matrices."""

    def __init__(self, shifted_FF: Tensor, weight_OF: Tensor, kept_mask_F: Tensor) -> None:
        kept_K, pruned_P = kept_mask_F.nonzero().squeeze(1), (~kept_mask_F).nonzero().squeeze(1)
        inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(shifted_FF[kept_K[:, None], kept_K]))
        across_KP = shifted_FF[kept_K[:, None], pruned_P]
        map_KP = inverse_KK @ across_KP
        target_OF = weight_OF @ shifted_FF
        best_OK = target_OF[:, kept_K] @ inverse_KK
        v_OF = torch.empty_like(weight_OF)
        v_OF[:, kept_K], v_OF[:, pruned_P] = best_OK, target_OF[:, pruned_P] - best_OK @ across_KP
        self.t_FF = torch.empty_like(shifted_FF)
        self.t_FF[kept_K[:, None], kept_K] = -inverse_KK
        self.t_FF[kept_K[:, None], pruned_P], self.t_FF[pruned_P[:, None], kept_K] = map_KP, map_KP.T
        self.t_FF[pruned_P[:, None], pruned_P] = shifted_FF[pruned_P[:, None], pruned_P] - across_KP.T @ map_KP
        self.n_FF = v_OF.T @ v_OF
        self.kept_mask_F = kept_mask_F.clone()
        self._clear()

    def _clear(self) -> None:
        width = self.kept_mask_F.numel()
        self.count = 0
        self.pivots_B = self.t_FF.new_empty(2 * _BLOCK)
        self.a_t_B2F = self.t_FF.new_empty(2 * _BLOCK, 2, width)
        self.fixed_F = self.t_FF.new_zeros(width)

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Row `index` of T and of N as they are now."""
        past_B2F = self.a_t_B2F[: self.count]
        a_B, t_B = past_B2F[:, 0, index], past_B2F[:, 1, index]
        t_F = torch.addmv(self.t_FF[index], past_B2F[:, 1].T, self.pivots_B[: self.count] * t_B, alpha=-1.0)
        t_F[index] -= self.fixed_F[index]
        mixed_B = torch.stack((t_B, a_B), dim=1).flatten()
        n_F = torch.addmv(self.n_FF[index], past_B2F.flatten(0, 1).T, mixed_B, alpha=-1.0)
        return t_F, n_F

    def pivot(self, index: int) -> None:
        """Move one channel in or out of the kept set."""
        row_F, n_F = self.rows(index)
        pivot = float(row_F[index])
        t_F = row_F / pivot
        t_F[index] = 1.0 - 1.0 / abs(pivot)
        self.pivots_B[self.count] = pivot
        self.a_t_B2F[self.count, 0] = n_F - 0.5 * n_F[index] * t_F
        self.a_t_B2F[self.count, 1] = t_F
        self.fixed_F[index] += 2.0 if pivot > 0.0 else -2.0
        self.count += 1
        self.kept_mask_F[index] = ~self.kept_mask_F[index]

    def apply(self) -> None:
        """Take the block's pivots into the matrices."""
        past_B2F = self.a_t_B2F[: self.count]
        t_BF = past_B2F[:, 1]
        self.t_FF.addmm_(t_BF.T, self.pivots_B[: self.count, None] * t_BF, alpha=-1.0)
        self.t_FF.diagonal().sub_(self.fixed_F)
        flat_BF = past_B2F.flatten(0, 1)
        self.n_FF.addmm_(flat_BF.T, past_B2F.flip(1).flatten(0, 1), alpha=-1.0)
        self._clear()


def _change(t_ii: Tensor, t_jj: Tensor, t_ij: Tensor, n_ii: Tensor, n_jj: Tensor, n_ij: Tensor) -> Tensor:
    """What the loss becomes more by when kept i leaves and pruned j comes in, exactly."""
    g = t_ij / t_jj
    return (n_ii - 2.0 * g * n_ij + g.square() * n_jj) / (g.square() * t_jj - t_ii) - n_jj / t_jj


def _candidates(swept: _Swept, allowed_F: Tensor) -> list[tuple[int, int, float]]:
    """Disjoint (i, j, change) from one look at every pair, best first, at most half a block of them."""
    kept_K = swept.kept_mask_F.nonzero().squeeze(1)
    pruned_P = (~swept.kept_mask_F & allowed_F).nonzero().squeeze(1)
    t_F, n_F = swept.t_FF.diagonal(), swept.n_FF.diagonal()
    if kept_K.numel() == 0 or pruned_P.numel() == 0:
        return []
    pairs = (kept_K[:, None], pruned_P)
    change_KP = _change(
        t_F[kept_K, None], t_F[pruned_P], swept.t_FF[pairs], n_F[kept_K, None], n_F[pruned_P], swept.n_FF[pairs]
    )
    best_P, partner_P = change_KP.min(dim=0)
    found: list[tuple[int, int, float]] = []
    taken: set[int] = set()
    for position in best_P.argsort(stable=True).tolist():
        i = int(kept_K[partner_P[position]])
        if i not in taken and len(found) < _BLOCK // 2:
            taken.add(i)
            found.append((i, int(pruned_P[position]), float(best_P[position])))
    return found


def _objective(weight_OF: Tensor, swept: _Swept) -> float:
    """tr(W_P (A_PP - A_PS H A_SP) W_P')."""
    pruned_P = (~swept.kept_mask_F).nonzero().squeeze(1)
    weight_OP = weight_OF[:, pruned_P]
    return float(((weight_OP @ swept.t_FF[pruned_P[:, None], pruned_P]) * weight_OP).sum())


def swap(
    covariance_FF: Tensor, weight_OF: Tensor, kept_K: Tensor, *, ridge_rel: float, gain_rel: float = 1e-5
) -> Swapped:
    """Exchange pairs until no single exchange lowers the ridge objective by more than gain_rel of it.

    Each round looks at every pair once (O(F^2)), makes the best disjoint ones that still help after those before them,
    and brings the matrices up to date.
    """
    allowed_F = ~dead_channels(covariance_FF, weight_OF)
    if not bool(allowed_F.any()):
        return Swapped(kept_K=kept_K.sort().values, swaps=0, error_before=0.0, error=0.0)
    shifted_FF, _ = shifted_covariance(covariance_FF, ridge_rel)
    mask_F = torch.zeros(weight_OF.shape[1], dtype=torch.bool, device=kept_K.device)
    mask_F[kept_K] = True
    swept = _Swept(shifted_FF, weight_OF, mask_F)
    before = error = _objective(weight_OF, swept)
    swaps, made = 0, True
    while made:
        made = False
        for i, j, foreseen in _candidates(swept, allowed_F):
            if foreseen > -gain_rel * error:
                break
            (ti_F, ni_F), (tj_F, nj_F) = swept.rows(i), swept.rows(j)
            change = float(_change(ti_F[i], tj_F[j], ti_F[j], ni_F[i], nj_F[j], ni_F[j]))
            if change <= -gain_rel * error:
                swept.pivot(j)
                swept.pivot(i)
                error += change
                swaps, made = swaps + 1, True
        swept.apply()
    return Swapped(kept_K=swept.kept_mask_F.nonzero().squeeze(1), swaps=swaps, error_before=before, error=error)
