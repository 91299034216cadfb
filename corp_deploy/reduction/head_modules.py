"""A head site's new attention module, its weights set, with its reports."""

from dataclasses import replace

from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.rotation import rotated_back, rotated_maps
from corp_deploy.algebra.values import ValueRecovery

from . import heads
from .heads import HeadOutputs, QkAtSite, ValuesAtSite
from .logits import logit_error, logit_scale
from .method import Method
from .report import HeldOut, SiteReport, ridge_fit


def _qk_held_out(site: str, recovery: QkRecovery, held_out: HeadMoments, method: Method) -> HeldOut:
    error_H = logit_error(site, held_out, method, recovery.q_map_HRD, recovery.k_map_HRD)
    energy_H = logit_scale(site, held_out, method)
    return HeldOut(energy=float(energy_H.sum()), error=float(error_H.sum()))


def qk_report(
    site: str, dense: int, at_site: QkAtSite, method: Method, width: int, held_out: HeadMoments | None
) -> SiteReport:
    """What happened to queries and keys that had the width `dense` per head."""
    recovery = at_site.recovery
    return SiteReport(
        site=site,
        part="qk",
        width_dense=dense,
        width_asked=dense * method.attention_kept,
        width=width,
        energy=float(at_site.energy_H.sum()),
        error_uncompensated=float(recovery.residual_uncompensated_H.sum()),
        error=float(recovery.residual_H.sum()),
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        ridge_fit=ridge_fit(at_site.ridge),
        held_out=None if held_out is None else _qk_held_out(site, recovery, held_out, method),
    )


def value_report(
    site: str,
    dense: int,
    projection: tuple[Tensor, Tensor | None],
    at_site: ValuesAtSite,
    moments: HeadOutputs,
    method: Method,
    width: int,
    held_out: HeadOutputs | None,
) -> SiteReport:
    """What happened to values that had the width `dense` per head, read by a projection's weight and bias."""
    weight_OC, bias_O = projection
    values = at_site.recovery
    return SiteReport(
        site=site,
        part="v",
        width_dense=dense,
        width_asked=dense * method.attention_kept,
        width=width,
        energy=heads.output_energy(moments, weight_OC),
        error_uncompensated=values.residual_uncompensated,
        error=values.residual,
        r2=values.r2,
        condition=values.condition,
        ridge=values.ridge,
        ridge_fit=ridge_fit(at_site.ridge),
        held_out=None
        if held_out is None
        else HeldOut(
            energy=heads.output_energy(held_out, weight_OC),
            error=heads.error_of(values, weight_OC, bias_O, held_out),
        ),
    )


def rotated_qk(qk: QkRecovery) -> QkRecovery:
    """The same logits, by channels of more even ranges."""
    return replace(qk, q_map_HRD=rotated_maps(qk.q_map_HRD), k_map_HRD=rotated_maps(qk.k_map_HRD))


def rotated_values(values: ValueRecovery) -> ValueRecovery:
    """The same outputs, by channels of more even ranges."""
    weight_OK = rotated_back(values.weight_OK, len(values.v_map_HRV))
    return replace(values, v_map_HRV=rotated_maps(values.v_map_HRV), weight_OK=weight_OK)
