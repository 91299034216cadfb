"""Backward elimination of channels that span several columns of a layer's input, or that several layers read.

obs.py eliminates channels of one column each, for one layer.

With A = covariance + ridge * I, S the columns still there, H = A_SS^-1 and W the best weights on S, removing block g
costs tr(W_g (H_gg)^-1 W_g'): the optimal brain surgeon's loss, by which OSSCAR removes channels. With N = W'W that is
tr((H_gg)^-1 N_gg), so greedy elimination needs only the diagonal blocks of H and of N. With L L' = H_gg a removal
leaves

    H - U'U  and  N - B'U - U'B  with  U = L^-1 H_g:,  B = L^-1 N_g: - (L^-1 N_gg L'^-1) U / 2.

U and B of recent removals are kept as rows and subtracted from H and N many at a time; a removal computes only the rows
of H and N that belong to its own block. The cost of a channel that several layers read is summed over the layers, each
loss as a share of the variance of that layer's output, with one inverse per layer.

Legend: C blocks or channels, T columns of one, U = C T columns, O outputs, M blocks still in the matrices, m = M T, J
rows of recent removals; R readers (layers) with equally many columns per channel, X rows of a reader's weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .obs import DEAD_VARIANCE_REL, Elimination, obs, order_without_cost, shifted_covariance
from .patches import columns
from .quadratic import diagonal_blocks, variance

_ROWS = 128


class _Surgeon:
    """The matrices H and N of one layer, and the U and B of the latest removals, which are not subtracted yet.

    Methods take a block's position in the matrices; `here_M` is the number of the block at each position. A removed
    block stays in the matrices, marked in `gone_M`, until an eighth of them is removed.
    """

    def __init__(self, here_M: Tensor, factor_mm: Tensor, current_Om: Tensor) -> None:
        """Compute H from the lower Cholesky factor of A_SS and N from the best weights on S."""
        self.here_M, self.size = here_M, factor_mm.shape[0] // here_M.numel()
        self.gone_M = torch.zeros_like(here_M, dtype=torch.bool)
        self.h_mm, self.n_mm = torch.cholesky_inverse(factor_mm), current_Om.T @ current_Om
        self.h_MTT, self.n_MTT = (diagonal_blocks(each, here_M.numel()).contiguous() for each in (self.h_mm, self.n_mm))
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.b_u_J2m = self.h_mm.new_empty(max(_ROWS, self.size), 2, self.h_mm.shape[0])

    def costs(self) -> Tensor:
        """Return tr((H_gg)^-1 N_gg) of every block [M], infinite for removed ones."""
        solved_MTT = torch.cholesky_solve(self.n_MTT, torch.linalg.cholesky(self.h_MTT))
        cost_M = solved_MTT.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(0.0)
        return cost_M.masked_fill(self.gone_M, torch.inf)

    def remove_(self, place: Tensor) -> None:
        """Remove the block at position `place` of the matrices, a 0-dimensional int64 tensor."""
        pick = int(place)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadersOfTaps:
    """The matrices H and N of all readers with `taps` columns per channel, stacked."""

    inverses_RUU: Tensor
    norms_RUU: Tensor
    taps: int

    def costs(self) -> Tensor:
        """Return tr((H_gg)^-1 N_gg) of every channel [M], summed over readers; 0 for removed ones."""
        if self.taps == 1:
            inverse_RM, norm_RM = (each.diagonal(dim1=1, dim2=2) for each in (self.inverses_RUU, self.norms_RUU))
            cost_M: Tensor = (norm_RM.clamp_min(0.0) / inverse_RM).sum(dim=0)
            return cost_M
        solved_RMTT: Tensor = torch.linalg.solve(self._blocks(self.inverses_RUU), self._blocks(self.norms_RUU))
        return solved_RMTT.diagonal(dim1=2, dim2=3).sum(dim=2).clamp_min(0.0).sum(dim=0)

    def _blocks(self, matrix_RUU: Tensor) -> Tensor:
        apart: Tensor = matrix_RUU.unflatten(2, (-1, self.taps)).unflatten(1, (-1, self.taps))
        return apart.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    def remove_(self, pick: Tensor) -> None:
        """Remove a channel from H and N; set its block of H to the identity and its other entries to 0."""
        at_T = pick * self.taps + torch.arange(self.taps, device=pick.device)
        h_RTU, n_RTU = self.inverses_RUU[:, at_T], self.norms_RUU[:, at_T]
        k_RTU = torch.linalg.solve(h_RTU[:, :, at_T], h_RTU)
        left_RTU = n_RTU - 0.5 * n_RTU[:, :, at_T] @ k_RTU
        self.inverses_RUU.baddbmm_(h_RTU.mT, k_RTU, alpha=-1.0)
        self.norms_RUU.baddbmm_(left_RTU.mT, k_RTU, alpha=-1.0)
        self.norms_RUU.baddbmm_(k_RTU.mT, left_RTU, alpha=-1.0)
        for matrix_RUU in (self.inverses_RUU, self.norms_RUU):
            matrix_RUU[:, at_T] = 0.0
            matrix_RUU[:, :, at_T] = 0.0
        self.inverses_RUU[:, at_T, at_T] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """A = covariance + ridge I [U,U] and W A [X,U] of a reader; `share`: 1 / its output's variance, 0 if that is 0."""

    shifted_UU: Tensor
    target_XU: Tensor
    share: float
    taps: int

    def formed(self, here_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return H and `share` * N, both [m,m], over the columns of the channels `here_M`."""
        here_U = columns(here_M, self.taps)
        inverse_UU = torch.cholesky_inverse(torch.linalg.cholesky(self.shifted_UU[here_U[:, None], here_U]))
        weight_XU = self.target_XU[:, here_U] @ inverse_UU
        return inverse_UU, weight_XU.T @ weight_XU * self.share


class _Readers:
    """The matrices H and N of several readers over the channels `here_M`, with the interface of _Surgeon."""

    def __init__(self, readers: Sequence[_Reader], here_M: Tensor) -> None:
        self.here_M, self.gone_M = here_M, torch.zeros_like(here_M, dtype=torch.bool)
        by_taps: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for reader in readers:
            by_taps.setdefault(reader.taps, []).append(reader.formed(here_M))
        stacked = {taps: [torch.stack(each) for each in zip(*formed, strict=True)] for taps, formed in by_taps.items()}
        self.alike = [
            _ReadersOfTaps(inverses_RUU=both[0], norms_RUU=both[1], taps=taps) for taps, both in stacked.items()
        ]

    def costs(self) -> Tensor:
        cost_M = torch.stack([each.costs() for each in self.alike]).sum(dim=0)
        return cost_M.masked_fill(self.gone_M, torch.inf)

    def remove_(self, place: Tensor) -> None:
        for each in self.alike:
            each.remove_(place)
        self.gone_M[place] = True


def _remove_all(form: Callable[[Tensor], _Surgeon | _Readers], part_C: Tensor) -> tuple[Tensor, Tensor]:
    """Remove all blocks, each time the cheapest; return their numbers in order of removal and the costs, both [C].

    `form` builds H and N on the blocks left, again whenever half of the blocks are gone, so that rounding errors don't
    accumulate. `part_C` is the part of each block; every round removes one block of every part.
    """
    order, costs, parts = list[Tensor](), list[Tensor](), int(part_C.max()) + 1
    here_M = torch.arange(len(part_C), device=part_C.device)
    done_P = torch.zeros(parts, dtype=torch.bool, device=part_C.device)
    while len(here_M):
        formed = form(here_M)
        for _ in range(max(len(here_M) - len(here_M) // 2, 1)):
            cost_M = formed.costs().masked_fill(done_P[part_C[formed.here_M]], torch.inf)
            place = cost_M.argmin()
            order.append(formed.here_M[place])
            costs.append(cost_M[place])
            formed.remove_(place)
            done_P[part_C[order[-1]]] = True
            if len(order) % parts == 0:
                done_P.zero_()
        here_M = formed.here_M[~formed.gone_M]
    return torch.stack(order), torch.stack(costs)


def eliminate_blocks(
    covariance_UU: Tensor, weight_OU: Tensor, size: int, *, ridge_rel: float, group_of_C: Tensor | None = None
) -> Elimination:
    """Order all blocks of `size` columns by greedy backward elimination; O(U^3), one order for all widths.

    `obs` does the work for blocks of one column without groups. Blocks without variance or without weight cost nothing
    and go first, by index.

    Args:
        covariance_UU: float64 [U, U].
        weight_OU: float64 [O, U].
        size: columns of a block.
        ridge_rel: relative to the covariance's mean diagonal.
        group_of_C: the group of each block, numbered from 0, all groups of one size. Blocks then leave in rounds, one
            of every group, the cheapest first; after each round all groups have equally many blocks left.
    """
    if size == 1 and group_of_C is None:
        return obs(covariance_UU, weight_OU, ridge_rel=ridge_rel)
    if group_of_C is None:
        group_of_C = weight_OU.new_zeros(weight_OU.shape[1] // size, dtype=torch.int64)
    counts, blocks = group_of_C.bincount().unique().tolist(), len(group_of_C)
    assert len(counts) == 1, counts
    variance_U = covariance_UU.diagonal()
    read_OU = weight_OU * (variance_U > DEAD_VARIANCE_REL * variance_U.mean())
    if not bool(read_OU.any()):
        return order_without_cost(group_of_C)
    shifted = shifted_covariance(covariance_UU, ridge_rel)
    target_OU = read_OU @ shifted.matrix_FF

    def surgeon(here_M: Tensor) -> _Surgeon:
        if len(here_M) == blocks:
            return _Surgeon(here_M, shifted.factor_FF, read_OU)
        here_m = columns(here_M, size)
        factor_mm = torch.linalg.cholesky(shifted.matrix_FF[here_m[:, None], here_m])
        return _Surgeon(here_M, factor_mm, torch.cholesky_solve(target_OU[:, here_m].T, factor_mm).T)

    order_C, cost_C = _remove_all(surgeon, group_of_C)
    return Elimination(order_F=order_C, error_F=cost_C.cumsum(0), ridge=shifted.ridge)


def eliminate_coupled(
    covariances: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    ridge_rel: float,
    taps: Sequence[int] | None = None,
    part_C: Tensor | None = None,
) -> Elimination:
    """Order all channels that several layers read, by greedy backward elimination over all of these layers.

    Errors are sums over the layers of the lost share of each output's variance.

    Args:
        covariances: of the inputs of each layer, float64 [U,U].
        weights: of each layer, float64 [X,U].
        ridge_rel: relative to each covariance's mean diagonal.
        taps: the number of columns that a channel has in each layer's input, 1 by default.
        part_C: the part of each channel, numbered from 0, all parts of one size. Channels then leave in rounds, one of
            every part.
    """
    taps = [1] * len(weights) if taps is None else taps
    channels, where = weights[0].shape[1] // taps[0], weights[0].device
    part_C = torch.zeros(channels, dtype=torch.int64, device=where) if part_C is None else part_C
    varying_readers = [place for place, each in enumerate(covariances) if float(each.diagonal().sum()) > 0.0]
    if not varying_readers:  # no channel varies for any reader: biases absorb them all
        return order_without_cost(part_C)
    shifted = {place: shifted_covariance(covariances[place], ridge_rel) for place in varying_readers}
    energies = {place: variance(weights[place], covariances[place]) for place in varying_readers}
    readers = [
        _Reader(
            shifted_UU=shifted[place].matrix_FF,
            target_XU=weights[place] @ shifted[place].matrix_FF,
            share=1.0 / energies[place] if energies[place] > 0.0 else 0.0,
            taps=taps[place],
        )
        for place in varying_readers
    ]
    order_C, cost_C = _remove_all(lambda here_M: _Readers(readers, here_M), part_C)
    return Elimination(order_F=order_C, error_F=cost_C.cumsum(0), ridge=max(each.ridge for each in shifted.values()))
