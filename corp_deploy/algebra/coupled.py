"""Backward elimination of channels that several layers read, each by its own statistics.

What removing channel j costs is summed over the readers, each one's loss as a share of the variance of what it gives:
optimal brain surgeon as in block_obs.py, with one inverse a reader. A channel may be several columns of a reader.

Legend: R readers of as many columns a channel, C channels, M channels still in the matrices, T columns of each,
U = C T or M T, X rows of a reader (outputs, of each place of a kernel).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .obs import Elimination, shifted_covariance, without_cost
from .patches import columns
from .quadratic import variance


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Readers of T columns a channel: inverses and Grams of the best weights on what is left."""

    inverses_RUU: Tensor
    norms_RUU: Tensor
    taps: int

    def costs(self) -> Tensor:
        """tr((H_gg)^-1 N_gg) of every channel [M], summed over readers; of those gone 0."""
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
        """Take a channel out: its inverse becomes the identity, all else of it 0."""
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
    """A shifted covariance [U,U], what the best weights meet [X,U], and by what its losses are shares."""

    shifted_UU: Tensor
    target_XU: Tensor
    share: float
    taps: int

    def formed(self, here_M: Tensor) -> tuple[Tensor, Tensor]:
        """Inverse and Gram of the best weights on the channels that are left."""
        here_U = columns(here_M, self.taps)
        inverse_UU = torch.cholesky_inverse(torch.linalg.cholesky(self.shifted_UU[here_U[:, None], here_U]))
        weight_XU = self.target_XU[:, here_U] @ inverse_UU
        return inverse_UU, weight_XU.T @ weight_XU * self.share


def _formed(readers: Sequence[_Reader], here_M: Tensor) -> list[_Alike]:
    by_taps: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for reader in readers:
        by_taps.setdefault(reader.taps, []).append(reader.formed(here_M))
    stacked = {taps: [torch.stack(each) for each in zip(*formed, strict=True)] for taps, formed in by_taps.items()}
    return [_Alike(inverses_RUU=both[0], norms_RUU=both[1], taps=taps) for taps, both in stacked.items()]


def eliminate_coupled(
    covariances: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    ridge_rel: float,
    taps: Sequence[int] | None = None,
    part_C: Tensor | None = None,
) -> Elimination:
    """Order all channels by greedy backward elimination; errors are sums of shares lost.

    covariances: of each reader, float64 [U,U]; weights: of each reader, float64 [X,U]; ridge_rel: relative to each
    covariance's mean diagonal; taps: how many columns a channel is of each reader, one unless given. part_C: equally
    many channels each, numbered from 0; channels then leave in rounds, one of every part.
    """
    taps = [1] * len(weights) if taps is None else taps
    channels, where = weights[0].shape[1] // taps[0], weights[0].device
    part_C = torch.zeros(channels, dtype=torch.int64, device=where) if part_C is None else part_C
    varying_readers = [place for place, each in enumerate(covariances) if float(each.diagonal().sum()) > 0.0]
    if not varying_readers:  # no channel varies for any reader: biases take them all
        return without_cost(part_C)
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
    order, costs, parts = list[Tensor](), list[Tensor](), int(part_C.max()) + 1
    here_M, done_P = torch.arange(channels, device=where), torch.zeros(parts, dtype=torch.bool, device=where)
    while len(here_M):
        alike = _formed(readers, here_M)
        gone_M = torch.zeros(len(here_M), dtype=torch.bool, device=where)
        # Formed anew at each halving, so that rounding never piles up.
        for _ in range(max(len(here_M) - len(here_M) // 2, 1)):
            cost_M = torch.stack([each.costs() for each in alike]).sum(dim=0)
            pick = cost_M.masked_fill(gone_M | done_P[part_C[here_M]], torch.inf).argmin()
            for each in alike:
                each.remove_(pick)
            gone_M[pick] = True
            order.append(here_M[pick])
            costs.append(cost_M[pick])
            done_P[part_C[here_M[pick]]] = True
            if len(order) % parts == 0:
                done_P.zero_()
        here_M = here_M[~gone_M]
    error_C = torch.stack(costs).cumsum(0)
    return Elimination(order_F=torch.stack(order), error_F=error_C, ridge=max(each.ridge for each in shifted.values()))
