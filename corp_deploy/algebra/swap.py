"""Exchanges of one kept channel for one pruned channel, while they lower the loss that obs.py eliminates by.

Everything about a kept set S is in two symmetric matrices over all channels. With A = covariance + ridge I,
H = A_SS^-1 and V = [best weights on S | residual of the pruned columns]:

    T = [ -H        H A_SP                 ]        N = V'V
        [ A_PS H    A_PP - A_PS H A_SP     ]

Moving a channel p in or out of S is one pivot: T - T_pp t t' and V - V_p t' with t = T_p / T_pp but t_p = 1 - 1/|T_pp|,
after which only T_pp needs a constant subtracted. Pivots stay vectors for a block and are applied in one product. As
that constant is 2, covariances are first scaled to a mean diagonal of about 1, by a power of two.

Legend: F channels, O outputs, K kept, P pruned, B pivots in a block.
"""

import math

import torch
from torch import Tensor

from .obs import dead_channels, shifted_covariance
from .scores import complement

_BLOCK = 64
_ROWS = 64
_GAIN_REL = 1e-5  # the least share of the loss that an exchange has to gain
_FALL, _ROUNDS = 0.1, 8  # the loss is computed anew after a round that lowers it so much, and after so many rounds


class _Swept:
    """T and N of a kept set, and the pivots of this round, which are not applied yet.

    Kept channels stand before pruned ones. Methods take positions; `channel_F` holds the channel at each position.
    """

    def __init__(self, shifted_FF: Tensor, weight_OF: Tensor, kept_K: Tensor) -> None:
        self.kept = kept_K.numel()
        self.channel_F = torch.cat((kept_K, complement(kept_K, weight_OF.shape[1])))
        a_FF = shifted_FF.index_select(0, self.channel_F).index_select(1, self.channel_F)
        self.weight_OF = weight_OF.index_select(1, self.channel_F)
        kept, pruned = slice(self.kept), slice(self.kept, None)
        inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(a_FF[kept, kept]))
        map_KP = inverse_KK @ a_FF[kept, pruned]
        target_OF = self.weight_OF @ a_FF
        best_OK = target_OF[:, kept] @ inverse_KK
        v_OF = torch.cat((best_OK, target_OF[:, pruned] - best_OK @ a_FF[kept, pruned]), dim=1)
        self.n_FF = v_OF.T @ v_OF
        a_FF[pruned, pruned] -= a_FF[pruned, kept] @ map_KP
        a_FF[kept, kept], a_FF[kept, pruned], a_FF[pruned, kept] = -inverse_KK, map_KP, map_KP.T
        self.t_FF = a_FF
        self._clear()

    def loss(self) -> float:
        """Compute the loss tr(W_P (A_PP - A_PS H A_SP) W_P') of the present kept set."""
        left_OP = self.weight_OF[:, self.kept :]
        return float(((left_OP @ self.t_FF[self.kept :, self.kept :]) * left_OP).sum())

    def _clear(self) -> None:
        width = self.channel_F.numel()
        self.count = 0
        self.pivots_B = self.t_FF.new_empty(2 * _BLOCK)
        self.a_t_B2F = self.t_FF.new_empty(2 * _BLOCK, 2, width)
        self.fixed_F = self.t_FF.new_zeros(width)
        self.exchanged: list[tuple[int, int]] = []

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return row `index` of T and of N with the pivots applied."""
        past_B2F = self.a_t_B2F[: self.count]
        a_B, t_B = past_B2F[:, 0, index], past_B2F[:, 1, index]
        t_F = torch.addmv(self.t_FF[index], past_B2F[:, 1].T, self.pivots_B[: self.count] * t_B, alpha=-1.0)
        t_F[index] -= self.fixed_F[index]
        mixed_B = torch.stack((t_B, a_B), dim=1).flatten()
        n_F = torch.addmv(self.n_FF[index], past_B2F.flatten(0, 1).T, mixed_B, alpha=-1.0)
        return t_F, n_F

    def _pivot(self, index: int) -> None:
        row_F, n_F = self.rows(index)
        pivot = float(row_F[index])
        t_F = row_F / pivot
        t_F[index] = 1.0 - 1.0 / abs(pivot)
        self.pivots_B[self.count] = pivot
        self.a_t_B2F[self.count, 0] = n_F - 0.5 * n_F[index] * t_F
        self.a_t_B2F[self.count, 1] = t_F
        self.fixed_F[index] += 2.0 if pivot > 0.0 else -2.0
        self.count += 1

    def exchange(self, i: int, j: int) -> None:
        """Move the kept channel at i out and the pruned one at j in; `apply` swaps their positions."""
        self._pivot(j)
        self._pivot(i)
        self.exchanged.append((i, j))

    def apply(self) -> None:
        """Apply the round's pivots to the matrices and move its exchanged channels to their new positions."""
        past_B2F = self.a_t_B2F[: self.count]
        t_BF = past_B2F[:, 1]
        self.t_FF.addmm_(t_BF.T, self.pivots_B[: self.count, None] * t_BF, alpha=-1.0)
        self.t_FF.diagonal().sub_(self.fixed_F)
        self.n_FF.addmm_(past_B2F.flatten(0, 1).T, past_B2F.flip(1).flatten(0, 1), alpha=-1.0)
        there = torch.tensor(self.exchanged, device=self.channel_F.device).T.flatten()
        here = there.roll(len(self.exchanged))
        self.channel_F[here], self.weight_OF[:, here] = self.channel_F[there], self.weight_OF[:, there]
        for matrix_FF in (self.t_FF, self.n_FF):
            matrix_FF[here] = matrix_FF[there]
            matrix_FF[:, here] = matrix_FF[:, there]
        self._clear()


def _change(t_ii: Tensor, t_jj: Tensor, t_ij: Tensor, n_ii: Tensor, n_jj: Tensor, n_ij: Tensor) -> Tensor:
    """Return the exact change of the loss if kept channel i and pruned channel j are exchanged, from T and N."""
    g = t_ij / t_jj
    return (n_ii - 2.0 * g * n_ij + g.square() * n_jj) / (g.square() * t_jj - t_ii) - n_jj / t_jj


def _best_partners(swept: _Swept) -> tuple[Tensor, Tensor]:
    """Return for every pruned position the least change by any exchange, and the kept position of that exchange.

    It takes a few kept rows at a time, so that intermediate results stay in the processor's cache.
    """
    kept, t_F, n_F = swept.kept, swept.t_FF.diagonal(), swept.n_FF.diagonal()
    t_P, n_P = t_F[kept:], n_F[kept:]
    best_P = torch.full_like(t_P, torch.inf)
    partner_P = torch.zeros_like(t_P, dtype=torch.int64)
    for start in range(0, kept, _ROWS):
        rows = slice(start, min(start + _ROWS, kept))
        t_IP = swept.t_FF[rows, kept:]
        g_IP = t_IP / t_P
        gain_IP = (g_IP * n_P).sub_(swept.n_FF[rows, kept:], alpha=2.0).mul_(g_IP).add_(n_F[rows, None])
        gain_IP.div_(g_IP.mul_(t_IP).sub_(t_F[rows, None]))
        least_P, where_P = gain_IP.min(dim=0)
        better_P = least_P < best_P
        best_P, partner_P = torch.where(better_P, least_P, best_P), torch.where(better_P, where_P + start, partner_P)
    return best_P - n_P / t_P, partner_P


def _candidates(swept: _Swept, allowed_F: Tensor) -> list[tuple[int, int, float]]:
    """Return disjoint exchanges (i, j, change of the loss), best first, at most half a block of them."""
    if swept.kept == swept.channel_F.numel():
        return []
    best_P, partner_P = _best_partners(swept)
    best_P.masked_fill_(~allowed_F[swept.channel_F[swept.kept :]], torch.inf)
    pairs: list[tuple[int, int, float]] = []
    partners: set[int] = set()
    order_P = best_P.argsort(stable=True)
    for position, partner, change in zip(
        order_P.tolist(), partner_P[order_P].tolist(), best_P[order_P].tolist(), strict=True
    ):
        if len(pairs) == _BLOCK // 2 or change == torch.inf:
            break
        if partner not in partners:
            partners.add(partner)
            pairs.append((partner, swept.kept + position, change))
    return pairs


def swap(covariance_FF: Tensor, weight_OF: Tensor, kept_K: Tensor, *, ridge_rel: float) -> Tensor:
    """Exchange kept for pruned channels until no exchange of one pair lowers the ridge objective; return those kept.

    Each round looks at every pair once (O(F^2)), makes the best disjoint exchanges that still help after those before
    them, and updates the matrices. On nearly singular covariances the foreseen changes are no more than rounding
    errors, so the loss is computed anew now and then, and the exchanges end where it has not fallen.
    """
    allowed_F, best_K = ~dead_channels(covariance_FF, weight_OF), kept_K.sort().values
    if not bool(allowed_F.any()):
        return best_K
    _, exponent = math.frexp(float(covariance_FF.diagonal().mean()))
    scaled_FF = covariance_FF / math.ldexp(1.0, exponent)
    swept = _Swept(shifted_covariance(scaled_FF, ridge_rel).matrix_FF, weight_OF, kept_K)
    least = error = swept.loss()
    rounds, improved = 0, True
    while improved:
        improved, last = False, error
        for i, j, foreseen in _candidates(swept, allowed_F):
            if foreseen > -_GAIN_REL * error:
                break
            (ti_F, ni_F), (tj_F, nj_F) = swept.rows(i), swept.rows(j)
            change = float(_change(ti_F[i], tj_F[j], ti_F[j], ni_F[i], nj_F[j], ni_F[j]))
            if -error <= change <= -_GAIN_REL * error:
                swept.exchange(i, j)
                error += change
                improved = True
        if improved:
            swept.apply()
            rounds += 1
        if not improved or rounds % _ROUNDS == 0 or error < (1.0 - _FALL) * last:
            exact = swept.loss()
            if not 0.0 <= exact < least:
                break
            best_K, least = swept.channel_F[: swept.kept].sort().values, exact
            improved, error = improved and exact < (1.0 - _GAIN_REL) * last, exact
    return best_K
