"""Backward elimination of MLP channels by the loss that CORP states but does not rank by (its eq. 11).

With A = covariance + ridge * I and S the channels still there, the best output weights on S are (W A)[:, S] H,
H = A_SS^-1: CORP's eq. 9. Removing j then costs ||w_j||^2 / H_jj (optimal brain surgeon, one column at a time), so
greedy elimination needs only the diagonals of H and of N = (current weights)' (current weights). Both change by a known
low-rank term per removal. The terms of a block of removals are kept as vectors, from which each removal computes its
own row of H and N; at the end of the block one product adds all terms to the matrices.

Legend: F channels, O outputs, M channels still in the matrices, B removals in a block, K kept, P pruned.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .scores import complement

DEAD_VARIANCE_REL = 1e-12  # of the mean variance: a channel below it is a constant, which the bias absorbs
_RIDGE_FLOOR_REL = 1e-10  # below it a singular covariance has no trustworthy Cholesky factor in float64
_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """Every channel in the order of its removal, and the loss after each removal.

    order_F: the channel removed first, second, ...; the last entry would be the last one to stay.
    error_F: error_F[i] is the ridge objective tr((W - W') A (W - W')') after removals 0..i, in units of y squared; at
    least E||y - y'||^2, and larger by the ridge's share only.
    ridge: the number that was added to the diagonal of the covariance.
    """

    order_F: Tensor
    error_F: Tensor
    ridge: float

    def __post_init__(self) -> None:
        assert self.order_F.shape == self.error_F.shape, (self.order_F.shape, self.error_F.shape)

    def kept(self, width: int) -> Tensor:
        """Return the channels that stay at this width, ascending int64."""
        total = self.order_F.numel()
        assert 0 <= width <= total, (width, total)
        return self.order_F[total - width :].sort().values

    def error_at(self, width: int) -> float:
        """Return the objective at this width; 0 at full width."""
        removed = self.order_F.numel() - width
        assert 0 <= removed <= self.order_F.numel(), width
        return 0.0 if removed == 0 else float(self.error_F[removed - 1])


def order_without_cost(part_C: Tensor) -> Elimination:
    """Return an elimination without losses: each round removes the first channel left of every part."""
    place_C = torch.stack([(part_C[:i] == part).sum() for i, part in enumerate(part_C)])
    order_C = place_C.argsort(stable=True)
    return Elimination(order_F=order_C, error_F=torch.zeros_like(order_C, dtype=torch.float64), ridge=0.0)


def interleave(eliminations: Sequence[Elimination]) -> Elimination:
    """Join the eliminations of a grouped convolution's groups into one, round by round.

    Round r is the r-th removal of every group, in the groups' order; channels are numbered one group behind the other,
    equally many in each. Errors add up; `ridge` is the largest.
    """
    order_GC = torch.stack([elimination.order_F for elimination in eliminations])
    error_GC = torch.stack([elimination.error_F for elimination in eliminations])
    groups, channels = order_GC.shape
    first_G1 = channels * torch.arange(groups, device=order_GC.device)[:, None]
    cost_GC = error_GC.diff(dim=1, prepend=error_GC.new_zeros(groups, 1))
    return Elimination(
        order_F=(order_GC + first_G1).T.flatten(),
        error_F=cost_GC.T.flatten().cumsum(0),
        ridge=max(elimination.ridge for elimination in eliminations),
    )


def others_first(order: Elimination, channels: int, lost: float) -> Elimination:
    """Return the order of all channels in which those missing from `order` go first.

    Removing all the missing ones costs `lost`, in equal parts.
    """
    others = complement(order.order_F, channels)
    parts = torch.arange(1, len(others) + 1, device=others.device, dtype=torch.float64) / max(len(others), 1)
    return Elimination(
        order_F=torch.cat((others, order.order_F)),
        error_F=torch.cat((lost * parts, lost + order.error_F)),
        ridge=order.ridge,
    )


def dead_channels(covariance_FF: Tensor, weight_OF: Tensor) -> Tensor:
    """Return a mask [F], true for channels that cost nothing: constants, which a bias replaces, and zero weights."""
    variance_F = covariance_FF.diagonal()
    return (variance_F <= DEAD_VARIANCE_REL * variance_F.mean()) | (weight_OF.square().sum(dim=0) == 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularisedCovariance:
    """covariance + ridge * I and its lower Cholesky factor."""

    matrix_FF: Tensor
    factor_FF: Tensor
    ridge: float


def shifted_covariance(covariance_FF: Tensor, ridge_rel: float, *, scale: float | None = None) -> RegularisedCovariance:
    """Return covariance + ridge * I with its Cholesky factor.

    ridge = max(ridge_rel, 1e-10) * `scale`, by default the mean diagonal. If the factorisation fails, the ridge is
    raised tenfold until it succeeds.
    """
    scale = float(covariance_FF.diagonal().mean()) if scale is None else scale
    ridge = max(ridge_rel, _RIDGE_FLOOR_REL) * scale
    while True:
        shifted_FF = covariance_FF.clone()
        shifted_FF.diagonal().add_(ridge)
        factor_FF, failed = torch.linalg.cholesky_ex(shifted_FF)
        if int(failed) == 0:
            return RegularisedCovariance(matrix_FF=shifted_FF, factor_FF=factor_FF, ridge=ridge)
        ridge *= 10.0
        assert ridge < scale, (ridge, scale)


def removals_of_block(inverse_MM: Tensor, norms_MM: Tensor, gone_M: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Remove `count` channels, each time the cheapest; return their positions in the matrices and their costs [B].

    H (`inverse_MM`), N (`norms_MM`) and the mask of removed channels are updated in place. Positions stay on the
    device, so that the host doesn't wait for a GPU within the block.
    """
    width = gone_M.numel()
    picks_B = torch.empty(count, dtype=torch.int64, device=gone_M.device)
    costs_B = inverse_MM.new_empty(count)
    a_u_B2M = inverse_MM.new_empty(count, 2, width)  # norms lose a u' + u a', the inverse loses u u'
    inverse_M = inverse_MM.diagonal().masked_fill(gone_M, 1.0)
    norm_M = norms_MM.diagonal().masked_fill(gone_M, torch.inf)
    for step in range(count):
        pick_1 = torch.argmin(norm_M / inverse_M, dim=0, keepdim=True, out=picks_B[step : step + 1])
        past_BM = a_u_B2M[:step].view(2 * step, width)
        a_u_B2 = a_u_B2M[:step].index_select(2, pick_1).squeeze(2)
        h_M = torch.addmv(inverse_MM.index_select(0, pick_1)[0], a_u_B2M[:step, 1].T, a_u_B2[:, 1], alpha=-1.0)
        n_M = torch.addmv(norms_MM.index_select(0, pick_1)[0], past_BM.T, a_u_B2.flip(1).flatten(), alpha=-1.0)
        pivot_1 = h_M.index_select(0, pick_1)
        norm_1 = n_M.index_select(0, pick_1).clamp_min_(0.0)
        root_1 = pivot_1.sqrt()
        u_M = h_M / root_1
        a_M = n_M / root_1 - (0.5 * norm_1 / pivot_1) * u_M
        a_u_B2M[step, 0], a_u_B2M[step, 1] = a_M, u_M
        inverse_M -= u_M.square()
        norm_M -= 2.0 * a_M * u_M
        norm_M.clamp_min_(0.0)
        inverse_M.index_fill_(0, pick_1, 1.0)
        norm_M.index_fill_(0, pick_1, torch.inf)
        costs_B[step : step + 1] = norm_1 / pivot_1
    gone_M.index_fill_(0, picks_B, True)
    u_BM = a_u_B2M[:, 1]
    inverse_MM.addmm_(u_BM.T, u_BM, alpha=-1.0)
    norms_MM.addmm_(a_u_B2M.view(-1, width).T, a_u_B2M.flip(1).reshape(-1, width), alpha=-1.0)
    return picks_B, costs_B


Work = Callable[..., tuple[Tensor, ...]]
Graph = tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]
"""A CUDA graph, the tensors that it reads and changes, and the tensors that it returns."""


@dataclass(slots=True)
class CapturedWork:
    """`work(*tensors, count)`, thousands of tiny kernels, replayed as a CUDA graph on a GPU, called directly elsewhere.

    The host takes longer to launch these kernels than the GPU to run them. A graph is captured once for each shape.
    `work` changes tensors in place and returns new ones. Graphs stay in memory within a `keeping` context.

    Tensors are copied into the graph's own before a replay and back after it; results are copied out before another
    graph is replayed, so that all graphs share their memory.
    """

    work: Work
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    pool: Any = None
    depth: int = 0

    def __call__(self, *tensors: Tensor, count: int) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self.work(*tensors, count)
        key = (tensors[0].device, count, *((each.shape, each.dtype) for each in tensors))
        if key not in self.graphs:
            self.graphs[key] = self._captured(tensors, count)
        graph, held, found = self.graphs[key]
        for there, here in zip(held, tensors, strict=True):
            there.copy_(here)
        graph.replay()
        for there, here in zip(held, tensors, strict=True):
            here.copy_(there)
        return tuple(each.clone() for each in found)

    def _captured(self, tensors: tuple[Tensor, ...], count: int) -> Graph:
        held = [each.clone() for each in tensors]
        if not self.graphs:  # the first call of a library sets up what can't be captured
            self.pool = torch.cuda.graph_pool_handle()
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                self.work(*held, count)
            here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            found = self.work(*held, count)
        return graph, held, found

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the graphs captured inside until the outermost of these contexts ends, then free them."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.graphs.clear()


removals = CapturedWork(removals_of_block)


def _eliminate(shifted: RegularisedCovariance, weight_OF: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Remove every channel, at most `block` between updates of H and N; return order and costs of removal, both [F].

    H and N are computed anew each time half of the channels are gone, so that rounding doesn't accumulate.
    """
    here_M = torch.arange(weight_OF.shape[1], device=weight_OF.device)
    target_OF = weight_OF @ shifted.matrix_FF
    factor_MM, current_OM = shifted.factor_FF, weight_OF
    order: list[Tensor] = []
    costs: list[Tensor] = []
    while True:
        inverse_MM = torch.cholesky_inverse(factor_MM)
        if here_M.numel() < weight_OF.shape[1]:
            current_OM = target_OF[:, here_M] @ inverse_MM
        norms_MM = current_OM.T @ current_OM
        until = here_M.numel() // 2
        gone_M = torch.zeros(here_M.numel(), dtype=torch.bool, device=here_M.device)
        left = here_M.numel()
        while left > until:
            removed_B, spent_B = removals(inverse_MM, norms_MM, gone_M, count=min(block, left - until))
            order.append(here_M[removed_B])
            costs.append(spent_B)
            left -= removed_B.numel()
            if 8 * (gone_M.numel() - left) >= gone_M.numel():  # dead rows cost as much as live ones
                stay = (~gone_M).nonzero().squeeze(1)
                inverse_MM, norms_MM = inverse_MM[stay[:, None], stay], norms_MM[stay[:, None], stay]
                here_M, gone_M = here_M[stay], gone_M[stay]
        here_M = here_M[~gone_M]
        if here_M.numel() == 0:
            return torch.cat(order), torch.cat(costs)
        factor_MM = torch.linalg.cholesky(shifted.matrix_FF[here_M[:, None], here_M])


def obs(covariance_FF: Tensor, weight_OF: Tensor, *, ridge_rel: float, block: int = _BLOCK) -> Elimination:
    """Order all channels by greedy backward elimination; O(F^3), one order for all widths.

    Channels without variance or without weight go first, by index, and cost nothing.

    Args:
        covariance_FF: float64 [F, F].
        weight_OF: float64 [O, F].
        ridge_rel: relative to the covariance's mean diagonal.
        block: removals between two updates of the matrices.
    """
    dead_F = dead_channels(covariance_FF, weight_OF)
    first = dead_F.nonzero().squeeze(1)
    alive = (~dead_F).nonzero().squeeze(1)
    nothing = covariance_FF.new_zeros(first.numel())
    if alive.numel() == 0:
        return Elimination(order_F=first, error_F=nothing, ridge=0.0)
    scale = float(covariance_FF.diagonal().mean())
    shifted = shifted_covariance(covariance_FF[alive[:, None], alive], ridge_rel, scale=scale)
    with removals.keeping():
        order, costs = _eliminate(shifted, weight_OF[:, alive], block)
    error_F = torch.cat((nothing, costs))
    return Elimination(order_F=torch.cat((first, alive[order])), error_F=error_F.cumsum(0), ridge=shifted.ridge)
