"""Correct a linear layer by what its output still lacks, as far as held-out images bear it out.

Legend: K inputs and C outputs of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_deploy.algebra.regression import refit_toward
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


def correction(
    fit: RegressionSums,
    held_out: RegressionSums,
    scale_C: Tensor | None,
    energy: float | None,
    strengths: Sequence[float],
) -> Correction:
    """The linear map from a layer's inputs to what is lacking, divided through the layer scale.

    Its strength toward zero (no correction) is the one of least error on the held-out sums, none at all included; it is
    then solved on both. Rows that the layer scale all but silences get no correction.
    """
    on_fit, on_held_out = fit.regression(), held_out.regression()
    tried = {each: refit_toward(None, on_fit, strength=each) for each in sorted(strengths, reverse=True)}
    errors: dict[float | None, float] = {None: on_held_out.target_square}
    errors |= {each: on_held_out.error(refit.weight_OK, refit.bias_O) for each, refit in tried.items()}
    strength = min(errors, key=lambda each: errors[each])
    weight_CK, bias_C = torch.zeros_like(on_fit.cross_OK), torch.zeros_like(on_fit.mean_O)
    if strength is not None:
        whole = refit_toward(None, fit.with_those_of(held_out).regression(), strength=strength)
        weight_CK, bias_C = divided_by_scale(whole.weight_OK, scale_C), divided_by_scale(whole.bias_O, scale_C)
    report = LoopFit(
        strength=strength,
        energy=energy,
        error_recovered=on_fit.target_square,
        error=on_fit.target_square if strength is None else tried[strength].residual,
        error_recovered_held_out=errors[None],
        error_held_out=errors[strength],
    )
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
) -> LoopFit:
    """Correct a layer, in place, by the regression of what its output lacks, behind the layer scale, on its inputs.

    `energy` is the target's scale in the report.
    """
    change = correction(fit, held_out, scale_C, energy, strengths)
    add_correction_(layer, change)
    return change.fit


def correct_through_(
    layer: nn.Linear, fit: DifferenceSums, held_out: DifferenceSums, *, strengths: Sequence[float]
) -> LoopFit:
    """Correct a layer, in place, so that it makes of x what it made of x + d.

    With weight = Q R, Q's columns orthonormal, errors are those of R d, of which there are never more than inputs.
    """
    basis_OR, seen_RC = torch.linalg.qr(layer.weight.detach().double())
    change = correction(fit.through(seen_RC), held_out.through(seen_RC), None, None, strengths)
    add_correction_(layer, replace(change, weight_CK=basis_OR @ change.weight_CK, bias_C=basis_OR @ change.bias_C))
    return change.fit
