"""Correct a linear layer by what its output still lacks, as far as held-out images bear it out.

Legend: K inputs and C outputs of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from corp_deploy.algebra.regression import Regression, refit_toward
from corp_deploy.algebra.regression_sums import RegressionSums

from .report import LoopFit

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e6)  # the last one moves the bias only
_SILENT_REL = 1e-3  # of the root mean square layer scale: rows below it can't be fitted through it, and stay


_Ways = Sequence[tuple[Regression, Regression]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """Errors of a strength on what it was fitted to and on what was held out, the means of all ways round, of all
    groups together.
    """

    fitted: float
    held_out: float

    @classmethod
    def of_none(cls, groups: Sequence[_Ways]) -> "_Tried":
        """Without a correction."""
        return cls(
            fitted=sum(fmean(own.target_square for own, _ in ways) for ways in groups),
            held_out=sum(fmean(other.target_square for _, other in ways) for ways in groups),
        )

    @classmethod
    def at(cls, groups: Sequence[_Ways], strength: float) -> "_Tried":
        fitted = held_out = 0.0
        for ways in groups:
            refits = [(refit_toward(None, own, strength=strength, bound=True), other) for own, other in ways]
            fitted += fmean(refit.residual for refit, _ in refits)
            held_out += fmean(other.error(refit.weight_OK, refit.bias_O) for refit, other in refits)
        return cls(fitted=fitted, held_out=held_out)


def _ways(fit: RegressionSums, held_out: RegressionSums, *, both_ways: bool) -> _Ways:
    on_fit, on_held_out = fit.regression(), held_out.regression()
    return ((on_fit, on_held_out), (on_held_out, on_fit)) if both_ways else ((on_fit, on_held_out),)


def group_corrections(
    groups: Sequence[tuple[RegressionSums, RegressionSums]],
    energy: float,
    strengths: Sequence[float],
    *,
    both_ways: bool = False,
) -> tuple[list[tuple[Tensor, Tensor]], LoopFit]:
    """Weight and bias from the inputs of each group to what is lacking of its outputs, all of one strength.

    A group has its sums of the fit and those held out. The strength is that which errs least on what is held out, none
    where no correction does; with `both_ways` either half is fitted and judges the other. `energy`: of the target.
    """
    each_way = [_ways(fit, held_out, both_ways=both_ways) for fit, held_out in groups]
    trials: dict[float | None, _Tried] = {None: _Tried.of_none(each_way)}
    trials |= {each: _Tried.at(each_way, each) for each in sorted(strengths, reverse=True)}
    strength = min(trials, key=lambda each: trials[each].held_out)
    changes = [(torch.zeros_like(ways[0][0].cross_OK), torch.zeros_like(ways[0][0].mean_O)) for ways in each_way]
    del each_way
    if strength is not None:
        strength_whole = 0.5 * strength if both_ways else strength
        both = (fit.with_those_of(held_out).regression() for fit, held_out in groups)
        refits = (refit_toward(None, sums, strength=strength_whole, bound=True) for sums in both)
        changes = [(refit.weight_OK, refit.bias_O) for refit in refits]
    report = LoopFit(
        strength=strength,
        energy=energy,
        error_recovered=trials[None].fitted,
        error=trials[strength].fitted,
        error_recovered_held_out=trials[None].held_out,
        error_held_out=trials[strength].held_out,
    )
    return changes, report


def divided_by_scale(rows: Tensor, scale_C: Tensor) -> Tensor:
    """Rows [C,...] of a layer in front of the layer scale from those behind it; 0 where it all but silences them."""
    scale = scale_C.double().view(-1, *[1] * (rows.ndim - 1))
    silent = scale.abs() <= _SILENT_REL * scale.square().mean().sqrt()
    return torch.where(silent, 0.0, rows / torch.where(silent, 1.0, scale))
