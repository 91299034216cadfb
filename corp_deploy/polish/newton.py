"""A reduced sublayer's two layers fitted to the dense stream in turn, with no step size and no chance.

First the first layer, by a Gauss-Newton step through all that follows it (algebra/gauss_newton.py), then the last one,
by a regression on what now enters it. Both are chosen by the held-out inputs, where nothing ever becomes worse.

Legend: C channels of the stream, D those with a one for a bias, R rows of the first layer, K inputs of the last one.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from calib.calibrate import ALONE
from calib.distributed import Ranks
from corp_deploy.algebra.gauss_newton import gauss_newton
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.families.modules import fill_rows_
from corp_deploy.families.site import LinearSite
from corp_deploy.families.steps import Branch
from corp_deploy.reduction.branch_sums import StreamEnergy, inputs_sums
from corp_deploy.reduction.correct import STRENGTHS, add_to_, divided_by_scale
from corp_deploy.reduction.linear_loop import through_scale
from corp_deploy.reduction.streams import Pair

from .descent import Descent, Pace, Position
from .linearised import Linearised, counts
from .matrices import Matrix
from .report import Judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Newton:
    """How a sublayer's two layers are fitted in turn: the ridge of a Gauss-Newton step, after how
    many iterations of conjugate gradients it is looked at, which parts of it are tried; the ridges of a regression; and
    to how many tokens a step is fitted at most.
    """

    ridge_rel: float = 1e-2
    looks: tuple[int, ...] = (3, 8)
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    strengths: tuple[float, ...] = STRENGTHS
    most_tokens: int = 65_536

    def __post_init__(self) -> None:
        assert all(here < there for here, there in pairwise(self.looks)), self.looks
        assert self.most_tokens > 0, self.most_tokens


class _Judge:
    """The mean square of what the stream lacks behind the branch, over the tokens that count, of the pairs held out."""

    def __init__(self, branch: Branch, pairs: Sequence[Pair]) -> None:
        self.branch, self.pairs = branch, pairs
        energy = StreamEnergy()
        for pair in pairs:
            energy.add(pair.rows(branch.added_to(pair.target), branch.read), pair.row_weights(branch.read))
        self.energy = energy.variance()

    def error(self) -> float:
        sums, weights = list[Tensor](), list[Tensor]()
        for pair in self.pairs:
            behind_BNC = self.branch.through(self.branch.layer, pair.reduced, pair.present_BN)
            counts_BN = counts(self.branch, pair)
            square_BN = self.branch.added_to(pair.target - behind_BNC).square().sum(dim=-1)
            sums.append(torch.where(counts_BN > 0.0, square_BN * counts_BN, 0.0).double().sum())
            weights.append(counts_BN.double().sum())
        return float(torch.stack(sums).sum() / torch.stack(weights).sum())

    def relative(self, error: float) -> float:
        return math.sqrt(error / self.energy) if self.energy > 0.0 else math.sqrt(error)


def _set_(site: LinearSite, first_RD: Tensor) -> None:
    """The first layers' weights and, where they have one, their biases."""
    inputs, has_bias = site.first.in_features, site.first.bias is not None
    fill_rows_(site.firsts, first_RD[:, :inputs], first_RD[:, -1] if has_bias else None)


def _first(site: LinearSite) -> Tensor:
    whole = site.stacked_first()
    return whole.weight if whole.bias is None else torch.cat((whole.weight, whole.bias[:, None]), dim=1)


def _some(pairs: Sequence[Pair], most_tokens: int, sweep: int) -> Sequence[Pair]:
    """Each so many-th pair, others in each sweep, of so many tokens together at most, or one pair."""
    tokens = sum(pair.reduced.shape[:2].numel() for pair in pairs)
    stride = min(-(-tokens // most_tokens), len(pairs))
    return pairs[sweep % stride :: stride]


def step_first_(
    branch: Branch, site: LinearSite, pairs: Sequence[Pair], judge: _Judge, how: Newton, error: float
) -> float:
    """The first layer one Gauss-Newton step on, or the part of it that the held-out inputs bear out; their error."""
    start_RD = best_RD = _first(site)
    steps = gauss_newton(Linearised(branch, site, pairs), ridge_rel=how.ridge_rel, iterations=how.looks[-1])
    for iteration, step_RD in enumerate(steps, start=1):
        if iteration not in how.looks:
            continue
        last = math.inf
        for share in how.shares:
            _set_(site, start_RD + share * step_RD)
            now = judge.error()
            if now < error:
                error, best_RD = now, _first(site)
            if not now < last:  # along a line the error falls, then rises
                break
            last = now
    _set_(site, best_RD)
    return error


def _refit(branch: Branch, site: LinearSite, pairs: Iterable[Pair], how: Newton) -> tuple[Tensor, Tensor] | None:
    """The change of the last layer's weight and bias by the regression that errs least on the held-out inputs; None
    where no change is best. Solved on the others alone, so that those held out can go on judging.
    """
    weight_CK, bias_C = through_scale(site.last, branch.scale_C)
    lacking = inputs_sums(branch, branch.layer, site.last, pairs)
    left = lacking.each(lambda sums: sums.less(weight_CK, bias_C).regression())
    refits = [refit_toward(None, left.fit, strength=strength) for strength in sorted(how.strengths, reverse=True)]
    errors = [left.held_out.error(refit.weight_OK, refit.bias_O) for refit in refits]
    if not errors or min(errors) >= left.held_out.target_square:
        return None
    best = refits[errors.index(min(errors))]
    return divided_by_scale(best.weight_OK, branch.scale_C), divided_by_scale(best.bias_O, branch.scale_C)


def refit_last_(
    branch: Branch, site: LinearSite, pairs: Iterable[Pair], judge: _Judge, how: Newton, error: float
) -> float:
    """The last layer refitted, unless that errs more on the held-out inputs; their error."""
    change = _refit(branch, site, pairs, how)
    if change is None:
        return error
    weight_CK, bias_C = site.last.weight.clone(), None if site.last.bias is None else site.last.bias.clone()
    add_to_(site.last, *change)
    now = judge.error()
    if now < error:
        return now
    site.last.weight.copy_(weight_CK)
    site.last.bias = None if bias_C is None else nn.Parameter(bias_C, requires_grad=False)
    return error


class Sweeps:
    """One sublayer of a reduced model fitted in place, step by step as Descent has it: a step is a sweep over both of
    its layers, and the sweeps end where nothing is gained.

    `site` is that of the branch's layer; the pairs' dense stream is behind the branch, the reduced one before it. Those
    held out judge and are fitted to by none. Every process does the same.
    """

    def __init__(
        self, branch: Branch, site: LinearSite, pairs: Sequence[Pair], how: Newton, pace: Pace, ranks: Ranks = ALONE
    ) -> None:
        self.branch, self.site, self.pairs, self.how, self.pace, self.ranks = branch, site, pairs, how, pace, ranks
        self.fitted = [pair for pair in pairs if not pair.held_out]
        self.judge = _Judge(branch, [pair for pair in pairs if pair.held_out])
        firsts = dict(zip(("first", "first2"), site.firsts, strict=False))
        names = firsts | {"last": site.last}
        self.matrices = tuple(
            Matrix(name=f"{site.name}/{name}", layer=layer, scale=1.0) for name, layer in names.items()
        )

    def start(self) -> Position:
        """Nothing done yet, judged once."""
        error = self.judge.relative(self.judge.error())
        values = [matrix.values_OK for matrix in self.matrices]
        return Position(
            values=values,
            means=[],
            squares=[],
            average=[],
            best=values,
            curve=(Judged(step=0, seconds=0.0, error=error, averaged=error),),
            best_error=error,
        )

    def _sweep_(self, step: int) -> None:
        error = self.judge.error()
        some = _some(self.fitted, self.how.most_tokens, step)
        error = step_first_(self.branch, self.site, some, self.judge, self.how, error)
        refit_last_(self.branch, self.site, self.pairs, self.judge, self.how, error)

    @torch.no_grad()
    def run(
        self,
        position: Position,
        *,
        save: Callable[[Position], None] | None = None,
        done: Callable[[Position], None] | None = None,
    ) -> None:
        """Go on to the end of the way."""
        for matrix, value in zip(self.matrices, position.values, strict=True):
            matrix.set_(value)
        before, began, gained = position.seconds, time.monotonic(), True
        while gained and self.pace.way(position.step, position.seconds) < 1.0:
            self._sweep_(position.step)
            error = self.judge.relative(self.judge.error())
            gained = error < position.best_error
            position.step, position.seconds = position.step + 1, self._seconds(before, began)
            position.values, position.best_error = [matrix.values_OK for matrix in self.matrices], error
            position.best = position.values
            position.curve += (Judged(step=position.step, seconds=position.seconds, error=error, averaged=error),)
            for hear in (save, done):
                if hear is not None:
                    hear(position)

    def _seconds(self, before: float, began: float) -> float:
        """Since the start, of all attempts together; the first process's where time ends the fit."""
        own = before + time.monotonic() - began
        return own if self.pace.seconds is None else self.ranks.gathered(own)[0]

    report = staticmethod(Descent.report)
