"""A layer of a traced model, in a closed loop: what is lacking behind it is fitted and added to it.

Legend: G groups of a convolution, P outputs of a group, K columns of a layer.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import Called, groups_of

from .correct import divided_by_scale, group_corrections
from .report import LoopFit
from .traced_layer_sums import LayerSums
from .traced_streams import Student

Grouped: TypeAlias = tuple[Tensor, Tensor]
"""A weight [G,P,K] and a bias [G,P], float64."""


def grouped(program: Program, layer: Called) -> Grouped:
    """Those of a layer, copied."""
    weight, bias = program.tensor(layer.weight).double(), program.tensor(layer.bias).double()
    groups = groups_of(layer.node)
    return weight.reshape(groups, len(weight) // groups, -1).clone(), bias.reshape(groups, -1).clone()


def _columns(student: Student, layer: Called, weight_GPK: Tensor) -> list[Tensor]:
    """Of each group the columns that are left."""
    keep = student.kept_inputs(layer.node)
    groups, _, columns = weight_GPK.shape
    if keep is None:
        return [torch.arange(columns, device=weight_GPK.device)] * groups
    by_group = keep.reshape(groups, -1).to(weight_GPK.device)
    each = columns // by_group.shape[1]
    return [torch.nonzero(kept.repeat_interleave(each))[:, 0] for kept in by_group]


def fit_(
    student: Student,
    layer: Called,
    sums: LayerSums,
    strengths: Sequence[float],
    was: Grouped | None = None,
    *,
    both_ways: bool,
) -> LoopFit:
    """What is lacking still is added to the layer. `was`: its weights when the sums were taken, None for now.
    `both_ways`: what is held out is a half of all.
    """
    weight_GPK, bias_GP = grouped(student.program, layer)
    gain_GP = torch.ones_like(bias_GP) if sums.gain_O is None else sums.gain_O.double().view_as(bias_GP)
    changed = None if was is None else ((weight_GPK - was[0]) * gain_GP[..., None], (bias_GP - was[1]) * gain_GP)
    columns_G, is_biasless = _columns(student, layer, weight_GPK), layer.bias in student.tracing.biasless

    def still(half: RegressionSums, group: int) -> RegressionSums:
        half = half.uncentred() if is_biasless else half
        left = half if changed is None else half.less(changed[0][group], changed[1][group])
        return left.of(columns_G[group])

    left = [(still(fit, group), still(out, group)) for group, (fit, out) in enumerate(sums.groups())]
    changes, fit = group_corrections(left, sums.variance(), strengths, both_ways=both_ways)
    for group, ((change_PK, change_P), columns) in enumerate(zip(changes, columns_G, strict=True)):
        weight_GPK[group][:, columns] += divided_by_scale(change_PK, gain_GP[group])
        bias_GP[group] += divided_by_scale(change_P, gain_GP[group])
    weight = student.program.tensor(layer.weight)
    student.set_({layer.weight: weight_GPK.view_as(weight), layer.bias: bias_GP.flatten()})
    return fit
