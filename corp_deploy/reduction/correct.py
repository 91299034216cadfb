"""Corrections of a linear layer or convolution toward a target, by the ridge of least held-out error.

Legend: K inputs and C outputs of the layer, G groups of a convolution, P outputs of a group.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from corp_deploy.algebra.regression import Regression, RegressionSums, refit_toward
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import CalledLayer, group_count

from .layer_sums import LayerSums
from .report import LoopFit
from .stream_walk import Student

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 1e6)  # the last one changes the bias only
_SILENT_REL = 1e-3  # of the root mean square layer scale: rows with a smaller scale are not corrected


_Ways = Sequence[tuple[Regression, Regression]]


def _errors_at(groups: Sequence[_Ways], strength: float | None) -> tuple[float, float]:
    """Return the errors of a strength, None for no correction, on the fitted and on the held-out images.

    Each error is the mean over a group's pairs of fitted and judging sums, summed over the groups.
    """
    fitted = held_out = 0.0
    for ways in groups:
        if strength is None:
            errors = [(own.target_square, other.target_square) for own, other in ways]
        else:
            refits = [(refit_toward(None, own, strength=strength, bound=True), other) for own, other in ways]
            errors = [(refit.residual, other.error(refit.weight_OK, refit.bias_O)) for refit, other in refits]
        fitted += fmean(own for own, _ in errors)
        held_out += fmean(other for _, other in errors)
    return fitted, held_out


def fit_corrections(
    groups: Sequence[tuple[RegressionSums, RegressionSums]],
    energy: float,
    strengths: Sequence[float],
    *,
    both_ways: bool = False,
) -> tuple[list[tuple[Tensor, Tensor]], LoopFit]:
    """Fit a weight and bias from the inputs of each group to the residual of its outputs; return them and a report.

    Each group has the sums of the fit and the held-out sums. All ridges have the strength of least error on held-out
    images; with `both_ways` fits to either half are judged on the other. The result is then fitted to all images, or
    zero if no strength lowers the held-out error. `energy`: the target's, for the report.
    """
    each_way: list[_Ways] = []
    for fit, held_out in groups:
        pair = fit.regression(), held_out.regression()
        each_way.append((pair, pair[::-1]) if both_ways else (pair,))
    trials = {each: _errors_at(each_way, each) for each in (None, *sorted(strengths, reverse=True))}
    strength = min(trials, key=lambda each: trials[each][1])
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
        error_recovered=trials[None][0],
        error=trials[strength][0],
        error_recovered_held_out=trials[None][1],
        error_held_out=trials[strength][1],
    )
    return changes, report


def divide_by_scale(rows: Tensor, scale_C: Tensor) -> Tensor:
    """Divide rows [C,...] by the layer scale behind the layer; 0 where the scale is almost 0."""
    scale = scale_C.double().view(-1, *[1] * (rows.ndim - 1))
    silent = scale.abs() <= _SILENT_REL * scale.square().mean().sqrt()
    return torch.where(silent, 0.0, rows / torch.where(silent, 1.0, scale))


GroupedWeights: TypeAlias = tuple[Tensor, Tensor]
"""A weight [G,P,K] and a bias [G,P], float64."""


def weights_by_group(program: Program, layer: CalledLayer) -> GroupedWeights:
    """Return copies of a layer's weight and bias by groups."""
    weight, bias = program.tensor(layer.weight).double(), program.tensor(layer.bias).double()
    groups = group_count(layer.node)
    return weight.reshape(groups, len(weight) // groups, -1).clone(), bias.reshape(groups, -1).clone()


def _kept_columns(student: Student, layer: CalledLayer, weight_GPK: Tensor) -> list[Tensor]:
    keep = next((keep for _, _, keep in student.masks.get(layer.node, ())), None)
    groups, _, columns = weight_GPK.shape
    if keep is None:
        return [torch.arange(columns, device=weight_GPK.device)] * groups
    by_group = keep.reshape(groups, -1).to(weight_GPK.device)
    each = columns // by_group.shape[1]
    return [torch.nonzero(kept.repeat_interleave(each))[:, 0] for kept in by_group]


def correct_layer_(
    student: Student,
    layer: CalledLayer,
    sums: LayerSums,
    strengths: Sequence[float],
    was: GroupedWeights | None = None,
    *,
    both_ways: bool,
) -> LoopFit:
    """Add to a student layer's weight and bias, in place, a fit to the residual of its output; return the report.

    `was`: its weights when the sums were taken, None if unchanged since. `both_ways`: see fit_corrections.
    """
    weight_GPK, bias_GP = weights_by_group(student.program, layer)
    gain_GP = torch.ones_like(bias_GP) if sums.gain_O is None else sums.gain_O.double().view_as(bias_GP)
    columns_G, is_biasless = _kept_columns(student, layer, weight_GPK), layer.bias in student.tracing.biasless

    def still(half: RegressionSums, group: int) -> RegressionSums:
        half = half.uncentred() if is_biasless else half
        if was is not None:
            gain_P, change_PK, change_P = (
                gain_GP[group],
                weight_GPK[group] - was[0][group],
                bias_GP[group] - was[1][group],
            )
            half = half.less(change_PK * gain_P[:, None], change_P * gain_P)
        return half.of(columns_G[group])

    left = [(still(fit, group), still(out, group)) for group, (fit, out) in enumerate(sums.groups())]
    changes, fit = fit_corrections(left, sums.variance(), strengths, both_ways=both_ways)
    for group, ((change_PK, change_P), columns) in enumerate(zip(changes, columns_G, strict=True)):
        weight_GPK[group][:, columns] += divide_by_scale(change_PK, gain_GP[group])
        bias_GP[group] += divide_by_scale(change_P, gain_GP[group])
    weight = student.program.tensor(layer.weight)
    student.set_({layer.weight: weight_GPK.view_as(weight), layer.bias: bias_GP.flatten()})
    return fit
