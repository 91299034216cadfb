"""A reduced sublayer's two layers fitted to the dense stream in turn, with no step size and no chance.

First the first layer, by a Gauss-Newton step through all that follows it (algebra/gauss_newton.py), then the last one,
by a regression on what now enters it. Both are chosen by the held-out inputs, where nothing ever becomes worse.

Legend: B inputs of a pair, N tokens, C channels of the stream, D those with a one for a bias, R rows of the first
layer, K inputs of the last one.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.calibrate import ALONE
from calib.distributed import Ranks
from corp_deploy.algebra.gauss_newton import Residuals, gauss_newton
from corp_deploy.reduction.streams import StreamEnergy
from corp_deploy.traced.models.steps import SegmentStep

from .descent import Fit, Hear, Position, StepBudget
from .matrices import Matrix
from .report import Judged
from .walk import StreamPair

_SHARES = (1.0, 0.5, 0.25)  # of a step, that are tried
MOST_TOKENS = 65_536  # that a step is fitted to


@dataclass(frozen=True, slots=True, kw_only=True)
class Newton:
    """The ridge of a Gauss-Newton step, and after how many iterations of conjugate gradients it is looked at,
    ascending.
    """

    ridge_rel: float = 1e-2
    looks: tuple[int, ...] = (3, 8)


def counts(read: Tensor | None, pair: StreamPair) -> Tensor:
    """How much each token of the reduced stream counts behind a segment [B,N]; 0 where it isn't read or there."""
    x_BNC, present_BN, _ = pair.reduced.tokens
    is_read_N = torch.ones(pair.target.shape[1], device=x_BNC.device)
    if read is not None:
        is_read_N = torch.zeros_like(is_read_N).index_fill_(0, read, 1.0)
    is_read_BN = is_read_N.expand(len(x_BNC), -1)
    if present_BN is None or present_BN.shape != is_read_BN.shape:  # as of what is pooled
        return is_read_BN
    return is_read_BN * present_BN.to(is_read_BN)


def _counted(pair: StreamPair, read: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the reduced stream should be, at the tokens that are read, [B,N,C], or one row of tokens [1,X,C] where some
    are not there; and by how much each counts, None for all alike.
    """
    target_BNC, sizes_BN = pair.target, None if pair.reduced.tokens.sources is None else pair.reduced.tokens.sizes
    there_BN = None if pair.weights is None else pair.weights > 0.0
    if there_BN is not None and read is None and target_BNC.shape[1] != there_BN.shape[1]:
        there_BN = None
    if read is not None:
        target_BNC = target_BNC[:, read]
        sizes_BN, there_BN = (None if each is None else each[:, read] for each in (sizes_BN, there_BN))
    return target_BNC if there_BN is None else target_BNC[there_BN].unsqueeze(0), sizes_BN


class _Judge:
    """The mean square of what the stream lacks behind the segment, over the tokens that count, of the pairs held
    out.
    """

    def __init__(self, sublayer: "Sublayer", pairs: Sequence[StreamPair]) -> None:
        self.step, self.read, self.pairs = sublayer.step, sublayer.read, pairs
        energy = StreamEnergy()
        for pair in pairs:
            energy.add(*_counted(pair, self.read))
        self.energy = energy.variance()

    def error(self) -> float:
        sums, weights = list[Tensor](), list[Tensor]()
        for pair in self.pairs:
            behind_BNC = self.step(*pair.reduced.tokens[:2])
            counts_BN = counts(self.read, pair)
            square_BN = (pair.target - behind_BNC).square().sum(dim=-1)
            sums.append(torch.where(counts_BN > 0.0, square_BN * counts_BN, 0.0).double().sum())
            weights.append(counts_BN.double().sum())
        return float(torch.stack(sums).sum() / torch.stack(weights).sum())

    def relative(self, error: float) -> float:
        return math.sqrt(error / self.energy) if self.energy > 0.0 else math.sqrt(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Matrices that read the same inputs, and how a sublayer's outputs change with all of their rows."""

    matrices: tuple[Matrix, ...]
    linearised: Callable[[Sequence[StreamPair]], Iterable[Residuals]]

    @property
    def rows_RD(self) -> Tensor:
        """The rows of each in turn."""
        return torch.cat([matrix.values_OK for matrix in self.matrices])

    def set_(self, rows_RD: Tensor) -> None:
        parts = rows_RD.split([len(matrix.layer.weight) for matrix in self.matrices])
        for matrix, part in zip(self.matrices, parts, strict=True):
            matrix.set_(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """A segment by the `steps` in turn in which its layers are fitted; `read`: the tokens that count behind it, None
    for all.
    """

    step: SegmentStep
    read: Tensor | None
    steps: tuple[Step, ...]

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for step in self.steps for matrix in step.matrices)


def take_(step: Step, pairs: Sequence[StreamPair], judge: _Judge, how: Newton, error: float) -> float:
    """Layers one Gauss-Newton step on, or the part of it that the held-out inputs bear out; their error."""
    start_RD = best_RD = step.rows_RD
    steps = gauss_newton(step.linearised(pairs), ridge_rel=how.ridge_rel, iterations=how.looks[-1])
    for iteration, step_RD in enumerate(steps, start=1):
        if iteration not in how.looks:
            continue
        last = math.inf
        for share in _SHARES:
            step.set_(start_RD + share * step_RD)
            now = judge.error()
            if now < error:
                error, best_RD = now, step.rows_RD
            if not now < last:  # along a line the error falls, then rises
                break
            last = now
    step.set_(best_RD)
    return error


class AlternatingFit(Fit):
    """One sublayer of a reduced model fitted in place, step by step as Descent has it: a step is a sweep over its
    layers, and the sweeps end where nothing is gained.

    The pairs' dense stream is behind the segment, the reduced one before it. Those held out judge and are fitted to by
    none. Every process does the same.
    """

    def __init__(
        self, sublayer: Sublayer, pairs: Sequence[StreamPair], how: Newton, pace: StepBudget, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(sublayer.matrices, pace, ranks)
        self.sublayer, self.how = sublayer, how
        self.fitted = [pair for pair in pairs if not pair.held_out]
        self.judge = _Judge(sublayer, [pair for pair in pairs if pair.held_out])

    def start(self) -> Position:
        return Position.first(self.values(), self.judge.relative(self.judge.error()))

    def _some(self, sweep: int) -> Sequence[StreamPair]:
        """Each so many-th pair, others in each sweep, of MOST_TOKENS together at most, or one pair."""
        tokens = sum(pair.reduced.tokens.x.shape[:2].numel() for pair in self.fitted)
        stride = min(-(-tokens // MOST_TOKENS), len(self.fitted))
        return self.fitted[sweep % stride :: stride]

    @torch.no_grad()
    def run(self, position: Position, save: Hear = lambda _: None, hear: Hear = lambda _: None) -> None:
        self.set_(position.values)
        before, began, gained = position.seconds, time.monotonic(), True
        while gained and self.pace.way(position.step, position.seconds) < 1.0:
            some, error = self._some(position.step), self.judge.error()
            for each in self.sublayer.steps:
                error = take_(each, some, self.judge, self.how, error)
            error = self.judge.relative(self.judge.error())
            gained = error < position.best_error
            position.step, position.seconds = position.step + 1, self.pace.since(before, began, self.ranks)
            position.values, position.best_error = self.values(), error
            position.best = position.values
            position.curve += (Judged(step=position.step, seconds=position.seconds, error=error, averaged=error),)
            save(position)
            hear(position)
