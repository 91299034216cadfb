"""A reduced sublayer's layers fitted to the dense stream in turn, without a step size and without randomness.

Each group of layers takes a Gauss-Newton step through everything behind it in the segment (algebra/gauss_newton.py).
Held-out inputs choose how much of the step is taken, so that their error never grows.

Legend: B inputs of a pair, N tokens, X tokens in one row, C channels of the stream, O outputs, D inputs of a layer, and
one more if it has a bias, R rows of a group's matrices.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_deploy.algebra.gauss_newton import Residuals, gauss_newton
from corp_deploy.reduction.streams import StreamEnergy
from corp_deploy.traced.models.steps import SegmentStep

from .walk import StreamPair

_SHARES = (1.0, 0.5, 0.25)  # the shares of a step that are tried
MOST_TOKENS = 65_536  # tokens that one step is fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The weight and bias of a linear layer or a pointwise convolution, by the layer's name in the model."""

    name: str
    layer: nn.Linear | nn.Conv2d

    @property
    def values_OD(self) -> Tensor:
        """A copy of weight and bias side by side."""
        weight_OD = self.layer.weight.detach().flatten(1)
        if self.layer.bias is None:
            return weight_OD.clone()
        return torch.cat([weight_OD, self.layer.bias.detach().unsqueeze(1)], dim=1)

    @torch.no_grad()
    def set_(self, values_OD: Tensor) -> None:
        weight = self.layer.weight
        weight.copy_(values_OD[:, : weight[0].numel()].reshape(weight.shape))
        if self.layer.bias is not None:
            self.layer.bias.copy_(values_OD[:, -1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Newton:
    """The ridge of a Gauss-Newton step, and the iterations of its solver after which the step is tried, ascending."""

    ridge_rel: float = 1e-2
    looks: tuple[int, ...] = (3, 8)


def token_weights_behind(read: Tensor | None, pair: StreamPair) -> Tensor:
    """Return the weight [B,N] of each token behind a segment: its size, 1 if not merged, 0 if unread or padding."""
    x_BNC, present_BN, _ = pair.reduced.tokens
    is_read_N = torch.ones(pair.target.shape[1], device=x_BNC.device)
    if read is not None:
        is_read_N = torch.zeros_like(is_read_N).index_fill_(0, read, 1.0)
    is_read_BN = is_read_N.expand(len(x_BNC), -1)
    if present_BN is None or present_BN.shape != is_read_BN.shape:  # a pooled stream
        return is_read_BN
    return is_read_BN * present_BN.to(is_read_BN)


def _wanted_stream(pair: StreamPair, read: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the wanted reduced stream at the tokens that are read, and their sizes [B,N], None without token merging.

    The stream is [B,N,C], or if some tokens are padding, one row of the other tokens [1,X,C].
    """
    target_BNC, sizes_BN = pair.target, None if pair.reduced.tokens.sources is None else pair.reduced.tokens.sizes
    there_BN = None if pair.weights is None else pair.weights > 0.0
    if there_BN is not None and read is None and target_BNC.shape[1] != there_BN.shape[1]:
        there_BN = None
    if read is not None:
        target_BNC = target_BNC[:, read]
        sizes_BN, there_BN = (None if each is None else each[:, read] for each in (sizes_BN, there_BN))
    return target_BNC if there_BN is None else target_BNC[there_BN].unsqueeze(0), sizes_BN


class _SublayerJudge:
    """A judge of a sublayer: the mean square error of the stream behind its segment, on held-out pairs."""

    def __init__(self, sublayer: "Sublayer", pairs: Sequence[StreamPair]) -> None:
        self.step, self.read, self.pairs = sublayer.step, sublayer.read, pairs
        energy = StreamEnergy()
        for pair in pairs:
            energy.add(*_wanted_stream(pair, self.read))
        self.energy = energy.variance()

    def error(self) -> float:
        sums, weights = list[Tensor](), list[Tensor]()
        for pair in self.pairs:
            behind_BNC = self.step(*pair.reduced.tokens)
            counts_BN = token_weights_behind(self.read, pair)
            square_BN = (pair.target - behind_BNC).square().sum(dim=-1)
            sums.append(torch.where(counts_BN > 0.0, square_BN * counts_BN, 0.0).double().sum())
            weights.append(counts_BN.double().sum())
        return float(torch.stack(sums).sum() / torch.stack(weights).sum())

    def relative(self, error: float) -> float:
        return math.sqrt(error / self.energy) if self.energy > 0.0 else math.sqrt(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Matrices that read the same inputs and take a step together.

    `linearised` returns the sublayer's residuals on some pairs, with the derivative of its outputs by all rows.
    """

    matrices: tuple[Matrix, ...]
    linearised: Callable[[Sequence[StreamPair]], Iterable[Residuals]]

    @property
    def rows_RD(self) -> Tensor:
        """The rows of all matrices, one matrix after the other."""
        return torch.cat([matrix.values_OD for matrix in self.matrices])

    def set_(self, rows_RD: Tensor) -> None:
        parts = rows_RD.split([len(matrix.layer.weight) for matrix in self.matrices])
        for matrix, part in zip(self.matrices, parts, strict=True):
            matrix.set_(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """A segment with groups of its layers in fitting order; `read`: the tokens behind it that count, None for all."""

    step: SegmentStep
    read: Tensor | None
    groups: tuple[LayerGroup, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for group in self.groups for matrix in group.matrices)


def _step_(group: LayerGroup, pairs: Sequence[StreamPair], judge: _SublayerJudge, how: Newton, error: float) -> float:
    """Move a group's layers by the share of a Gauss-Newton step of least held-out error; return that error.

    The layers stay unchanged if no share lowers `error`, the held-out error before.
    """
    start_RD = best_RD = group.rows_RD
    steps = gauss_newton(group.linearised(pairs), ridge_rel=how.ridge_rel, iterations=how.looks[-1])
    for iteration, step_RD in enumerate(steps, start=1):
        if iteration not in how.looks:
            continue
        last = math.inf
        for share in _SHARES:
            group.set_(start_RD + share * step_RD)
            now = judge.error()
            if now < error:
                error, best_RD = now, group.rows_RD
            if not now < last:  # along a line the error falls first, then rises
                break
            last = now
    group.set_(best_RD)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A fitted sublayer: the number of sweeps, and the held-out relative error before and after, never larger."""

    part: str
    steps: int
    seconds: float
    error_before: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepBudget:
    sweeps: int | None
    seconds: float | None

    def spent(self, sweeps: int, seconds: float) -> float:
        """Return the share of the budget that is spent, in [0, 1]."""
        by_sweeps = 0.0 if self.sweeps is None else sweeps / self.sweeps
        if self.seconds is None:
            return min(1.0, by_sweeps)
        return min(1.0, max(by_sweeps, seconds / self.seconds if self.seconds > 0.0 else 1.0))


def _sample_pairs(pairs: Sequence[StreamPair], sweep: int) -> Sequence[StreamPair]:
    """Return evenly spaced pairs with about MOST_TOKENS tokens in all, at least one; each sweep takes other pairs."""
    tokens = sum(pair.reduced.tokens.x.shape[:2].numel() for pair in pairs)
    stride = min(-(-tokens // MOST_TOKENS), len(pairs))
    return pairs[sweep % stride :: stride]


@torch.no_grad()
def fit_sublayer_(
    sublayer: Sublayer,
    pairs: Sequence[StreamPair],
    budget: SweepBudget,
    how: Newton | None = None,
    on_sweep: Callable[[PartReport], None] | None = None,
) -> PartReport:
    """Fit a sublayer in place by sweeps over its layers, until the held-out error stops falling or `budget` is spent.

    A pair holds the dense stream behind the segment and the reduced one before it; held-out pairs judge.
    """
    fitted = [pair for pair in pairs if not pair.held_out]
    judge = _SublayerJudge(sublayer, [pair for pair in pairs if pair.held_out])
    began, error = time.monotonic(), judge.error()
    before = judge.relative(error)
    report = PartReport(part=sublayer.step.name, steps=0, seconds=0.0, error_before=before, error=before)
    gained = True
    while gained and budget.spent(report.steps, report.seconds) < 1.0:
        some = _sample_pairs(fitted, report.steps)
        for group in sublayer.groups:
            error = _step_(group, some, judge, how or Newton(), error)
        error = judge.error()  # again, after the last step
        gained = judge.relative(error) < report.error
        report = replace(report, steps=report.steps + 1, seconds=time.monotonic() - began, error=judge.relative(error))
        if on_sweep is not None:
            on_sweep(report)
    return report
