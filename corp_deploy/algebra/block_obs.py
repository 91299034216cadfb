"""Backward elimination of inputs that leave in blocks of columns, a convolution's channels: obs.py, several at a time.

With A = covariance + ridge * I, S the columns still there, H = A_SS^-1 and W the best weights on S, removing block g
costs tr(W_g (H_gg)^-1 W_g'): the optimal brain surgeon's loss, by which OSSCAR removes channels. With N = W'W that is
tr((H_gg)^-1 N_gg), so that greedy elimination needs only the diagonal blocks of H and of N. With L L' = H_gg a removal
leaves

    H - U'U  and  N - B'U - U'B  with  U = L^-1 H_g:,  B = L^-1 N_g: - (L^-1 N_gg L'^-1) U / 2.

U and B of late removals are kept as rows; only the block at hand is formed, and the matrices take many at once.

Legend: C blocks, T columns of a block, U = C T columns, O outputs, M blocks in the matrices, m = M T, J kept rows.
"""

import torch
from torch import Tensor

from .obs import Elimination, RegularisedCovariance, obs, shifted_covariance, without_cost
from .patches import columns
from .quadratic import diagonal_blocks

_STILL_VARIANCE_REL = 1e-12  # of the mean variance: below it a column is a constant, and the bias takes it
_ROWS = 128


class _Surgeon:
    """H and N over some blocks, with the removals of late not yet applied.

    A block goes by its position here; `here_M` says which it is. One that is gone stays in the matrices until it is
    worth while to form smaller ones.
    """

    def __init__(self, here_M: Tensor, factor_mm: Tensor, current_Om: Tensor) -> None:
        """H from the lower Cholesky factor of A_SS, N from the best weights on S."""
        self.here_M, self.size = here_M, factor_mm.shape[0] // here_M.numel()
        self.gone_M = torch.zeros_like(here_M, dtype=torch.bool)
        self.h_mm, self.n_mm = torch.cholesky_inverse(factor_mm), current_Om.T @ current_Om
        self.h_MTT, self.n_MTT = (diagonal_blocks(each, here_M.numel()).contiguous() for each in (self.h_mm, self.n_mm))
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.b_u_J2m = self.h_mm.new_empty(max(_ROWS, self.size), 2, self.h_mm.shape[0])

    def costs(self) -> Tensor:
        """tr((H_gg)^-1 N_gg) of every block; infinite for those gone."""
        solved_MTT = torch.cholesky_solve(self.n_MTT, torch.linalg.cholesky(self.h_MTT))
        cost_M = solved_MTT.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(0.0)
        return cost_M.masked_fill(self.gone_M, torch.inf)

    def remove(self, pick: int) -> None:
        """Take this block out."""
        here = slice(pick * self.size, (pick + 1) * self.size)
        past_J2m = self.b_u_J2m[: self.rows]
        b_u_J2T = past_J2m[:, :, here]
        h_Tm = torch.addmm(self.h_mm[here], b_u_J2T[:, 1].T, past_J2m[:, 1], alpha=-1.0)
        n_Tm = torch.addmm(self.n_mm[here], b_u_J2T.flip(1).flatten(0, 1).T, past_J2m.flatten(0, 1), alpha=-1.0)
        factor_TT = torch.linalg.cholesky(self.h_MTT[pick])
        u_Tm = torch.linalg.solve_triangular(factor_TT, h_Tm, upper=False)
        b_Tm = torch.linalg.solve_triangular(factor_TT, n_Tm, upper=False)
        q_TT = torch.linalg.solve_triangular(factor_TT, b_Tm[:, here].T, upper=False)
        b_Tm -= 0.25 * (q_TT + q_TT.T) @ u_Tm
        self.b_u_J2m[self.rows : self.rows + self.size] = torch.stack((b_Tm, u_Tm), dim=1)
        self.rows += self.size
        self._mark(pick, b_Tm, u_Tm)
        if self.rows + self.size > self.b_u_J2m.shape[0]:
            self._apply()

    def _mark(self, pick: int, b_Tm: Tensor, u_Tm: Tensor) -> None:
        """Bring the diagonal blocks up to date."""
        u_MTT = u_Tm.view(self.size, -1, self.size).transpose(0, 1)
        bu_MTT = b_Tm.view(self.size, -1, self.size).permute(1, 2, 0) @ u_MTT
        self.h_MTT.baddbmm_(u_MTT.mT, u_MTT, alpha=-1.0)
        self.n_MTT -= bu_MTT + bu_MTT.mT
        self.h_MTT[pick] = torch.eye(self.size, dtype=u_Tm.dtype, device=u_Tm.device)
        self.gone_M[pick] = True

    def _apply(self) -> None:
        past_J2m = self.b_u_J2m[: self.rows]
        u_Jm = past_J2m[:, 1]
        self.h_mm.addmm_(u_Jm.T, u_Jm, alpha=-1.0)
        self.n_mm.addmm_(past_J2m.flatten(0, 1).T, past_J2m.flip(1).flatten(0, 1), alpha=-1.0)
        if 8 * int(self.gone_M.sum()) >= self.gone_M.numel():  # dead rows cost as much as live ones
            stay_M = (~self.gone_M).nonzero().squeeze(1)
            stay_m = columns(stay_M, self.size)
            self.h_mm, self.n_mm = self.h_mm[stay_m[:, None], stay_m], self.n_mm[stay_m[:, None], stay_m]
            self.h_MTT, self.n_MTT = self.h_MTT[stay_M], self.n_MTT[stay_M]
            self.here_M, self.gone_M = self.here_M[stay_M], self.gone_M[stay_M]
        self._clear()


def _remove_all(
    shifted: RegularisedCovariance, weight_OU: Tensor, size: int, group_of_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Blocks in order and what each costs; formed anew at each halving, so that rounding stays small."""
    count, groups = group_of_C.numel(), int(group_of_C.max()) + 1
    target_OU = weight_OU @ shifted.matrix_FF
    surgeon = _Surgeon(torch.arange(count, device=weight_OU.device), shifted.factor_FF, weight_OU)
    done_G = torch.zeros(groups, dtype=torch.bool, device=weight_OU.device)
    order: list[Tensor] = []
    costs: list[Tensor] = []
    until = count // 2
    for left in range(count, 0, -1):
        if left == until:
            here_M, until = surgeon.here_M[~surgeon.gone_M], until // 2
            here_m = columns(here_M, size)
            factor_mm = torch.linalg.cholesky(shifted.matrix_FF[here_m[:, None], here_m])
            surgeon = _Surgeon(here_M, factor_mm, torch.cholesky_solve(target_OU[:, here_m].T, factor_mm).T)
        cost_M = surgeon.costs().masked_fill(done_G[group_of_C[surgeon.here_M]], torch.inf)
        pick = int(cost_M.argmin())
        order.append(surgeon.here_M[pick])
        costs.append(cost_M[pick])
        surgeon.remove(pick)
        done_G[group_of_C[order[-1]]] = True
        if len(order) % groups == 0:
            done_G.zero_()
    return torch.stack(order), torch.stack(costs)


def eliminate_blocks(
    covariance_UU: Tensor, weight_OU: Tensor, size: int, *, ridge_rel: float, group_of_C: Tensor | None = None
) -> Elimination:
    """Order all blocks of `size` columns by greedy backward elimination, by `obs` where a block is one column; O(U^3),
    one pass for every width.

    covariance_UU: float64 [U, U]; weight_OU: float64 [O, U]; ridge_rel: relative to the covariance's mean diagonal.
    group_of_C: equally many blocks each, numbered from 0; blocks then leave in rounds, one of every group, the cheapest
    first, so that every multiple of the groups' number leaves equally many in each. Blocks without variance or without
    weight cost nothing and go first, by index.
    """
    if size == 1 and group_of_C is None:
        return obs(covariance_UU, weight_OU, ridge_rel=ridge_rel)
    group_of_C = (
        weight_OU.new_zeros(weight_OU.shape[1] // size, dtype=torch.int64) if group_of_C is None else group_of_C
    )
    count_G = group_of_C.bincount()
    counts = count_G.unique().tolist()
    assert len(counts) == 1, counts
    variance_U = covariance_UU.diagonal()
    read_OU = weight_OU * (variance_U > _STILL_VARIANCE_REL * variance_U.mean())
    if not bool(read_OU.any()):
        return without_cost(group_of_C)
    shifted = shifted_covariance(covariance_UU, ridge_rel)
    order_C, cost_C = _remove_all(shifted, read_OU, size, group_of_C)
    return Elimination(order_F=order_C, error_F=cost_C.cumsum(0), ridge=shifted.ridge)
