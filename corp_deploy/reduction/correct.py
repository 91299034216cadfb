"""Correct a linear layer by what its output still lacks, as far as held-out images bear it out.

Legend: K inputs and C outputs of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor, nn

from corp_deploy.algebra.regression import Regression, refit_toward
from corp_deploy.algebra.regression_sums import DifferenceSums, RegressionSums

from .report import LoopFit

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e6)  # the last one moves the bias only
_SILENT_REL = 1e-3  # of the root mean square layer scale: rows below it can't be fitted through it, and stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What to add to a linear layer's weight [C,K] and bias [C], in float64, and the report of the fit."""

    weight_CK: Tensor
    bias_C: Tensor
    fit: LoopFit


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
    energy: float | None,
    strengths: Sequence[float],
    *,
    both_ways: bool = False,
) -> tuple[list[tuple[Tensor, Tensor]], LoopFit]:
    """Weight and bias from the inputs of each group to what is lacking of its outputs, all of one strength.

    A group has its sums of the fit and those held out; else as `correction`.
    """
    each_way = [_ways(fit, held_out, both_ways=both_ways) for fit, held_out in groups]
    tried: dict[float | None, _Tried] = {None: _Tried.of_none(each_way)}
    tried |= {each: _Tried.at(each_way, each) for each in sorted(strengths, reverse=True)}
    strength = min(tried, key=lambda each: tried[each].held_out)
    changes = [(torch.zeros_like(ways[0][0].cross_OK), torch.zeros_like(ways[0][0].mean_O)) for ways in each_way]
    del each_way
    if strength is not None:
        strength_whole = 0.5 * strength if both_ways else strength
        both = (fit.with_those_of(held_out).regression() for fit, held_out in groups)
        refits = (refit_toward(None, whole, strength=strength_whole, bound=True) for whole in both)
        changes = [(refit.weight_OK, refit.bias_O) for refit in refits]
    report = LoopFit(
        strength=strength,
        energy=energy,
        error_recovered=tried[None].fitted,
        error=tried[strength].fitted,
        error_recovered_held_out=tried[None].held_out,
        error_held_out=tried[strength].held_out,
    )
    return changes, report


def correction(
    fit: RegressionSums,
    held_out: RegressionSums,
    scale_C: Tensor | None,
    energy: float | None,
    strengths: Sequence[float],
    *,
    both_ways: bool = False,
) -> Correction:
    """The linear map from a layer's inputs to what is lacking, divided through the layer scale.

    Its strength toward zero (no correction) is the one of least error on the held-out sums, none at all included; it is
    then solved on both. With `both_ways` the sums are of two halves, each judges what is fitted to the other, and both
    together take half the strength (see ridges.py). Rows that the layer scale all but silences get no correction.
    """
    changes, report = group_corrections([(fit, held_out)], energy, strengths, both_ways=both_ways)
    ((weight_CK, bias_C),) = changes
    weight_CK, bias_C = divided_by_scale(weight_CK, scale_C), divided_by_scale(bias_C, scale_C)
    return Correction(weight_CK=weight_CK, bias_C=bias_C, fit=report)


def divided_by_scale(rows: Tensor, scale_C: Tensor | None) -> Tensor:
    """Rows [C,...] of a layer in front of the layer scale from those behind it; 0 where it all but silences them."""
    if scale_C is None:
        return rows
    scale = scale_C.double().view(-1, *[1] * (rows.ndim - 1))
    silent = scale.abs() <= _SILENT_REL * scale.square().mean().sqrt()
    return torch.where(silent, 0.0, rows / torch.where(silent, 1.0, scale))


@torch.no_grad()
def add_to_(layer: nn.Linear, weight_CK: Tensor, bias_C: Tensor) -> None:
    """Add to a linear layer's weight and bias, in float64; a bias is made where there is none and one is needed."""
    layer.weight.copy_(layer.weight.double() + weight_CK)
    if layer.bias is None and bool(bias_C.any()):
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]), requires_grad=False)
    if layer.bias is not None:
        layer.bias.copy_(layer.bias.double() + bias_C)


def add_correction_(layer: nn.Linear, change: Correction) -> None:
    """Add a correction to a linear layer."""
    add_to_(layer, change.weight_CK, change.bias_C)


def correct_(
    layer: nn.Linear,
    fit: RegressionSums,
    held_out: RegressionSums,
    *,
    scale_C: Tensor | None,
    energy: float | None,
    strengths: Sequence[float],
    both_ways: bool = False,
) -> LoopFit:
    """Correct a layer, in place, by the regression of what its output lacks, behind the layer scale, on its inputs.

    `energy` is the target's scale in the report.
    """
    change = correction(fit, held_out, scale_C, energy, strengths, both_ways=both_ways)
    add_correction_(layer, change)
    return change.fit


def correct_through_(
    layer: nn.Linear,
    fit: DifferenceSums,
    held_out: DifferenceSums,
    *,
    strengths: Sequence[float],
    both_ways: bool = False,
) -> LoopFit:
    """Correct a layer, in place, so that it makes of x what it made of x + d.

    With weight = Q R, Q's columns orthonormal, errors are those of R d, of which there are never more than inputs.
    """
    basis_OR, seen_RC = torch.linalg.qr(layer.weight.detach().double())
    through = fit.through(seen_RC), held_out.through(seen_RC)
    change = correction(*through, None, None, strengths, both_ways=both_ways)
    add_correction_(layer, replace(change, weight_CK=basis_OR @ change.weight_CK, bias_C=basis_OR @ change.bias_C))
    return change.fit
