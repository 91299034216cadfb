"""A head site's new attention module, its weights set, with its reports."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from calib.moments import HeadMoments
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.rotation import rotated_back, rotated_maps
from corp_deploy.algebra.values import ValueRecovery
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.widths import EMPTY_HEADS, HeadWidths

from . import heads
from .emptied import constant_report, mean_given
from .heads import Given, Halves, HeadMaps, QkAtSite, ValuesAtSite, kept_qk, leaves_values, qk_at_site, values_at_site
from .kind import LinearReduced
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
    moments: Given,
    method: Method,
    width: int,
    held_out: Given | None,
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


def _projection(site: HeadSite) -> tuple[Tensor, Tensor | None]:
    """The output projection's dense weight and bias in float64."""
    bias_O = None if site.last.bias is None else site.last.bias.detach().double()
    return site.last.weight.detach().double(), bias_O


def _rotated(
    site: HeadSite, method: Method, widths: HeadWidths, qk: QkRecovery, values: ValueRecovery
) -> tuple[QkRecovery, ValueRecovery]:
    """In the method's gauge, which errors don't depend on: queries and keys, and values, where they became fewer and
    may be mixed.
    """
    if method.rotates and site.mixing == "free" and widths.qk < site.qk:
        qk = rotated_qk(qk)
    if method.rotates and not site.keeps_v and widths.v < site.v:
        values = rotated_values(values)
    return qk, values


def rotated_qk(qk: QkRecovery) -> QkRecovery:
    """The same logits, by channels of more even ranges."""
    return replace(qk, q_map_HRD=rotated_maps(qk.q_map_HRD), k_map_HRD=rotated_maps(qk.k_map_HRD))


def rotated_values(values: ValueRecovery) -> ValueRecovery:
    """The same outputs, by channels of more even ranges."""
    weight_OK = rotated_back(values.weight_OK, len(values.v_map_HRV))
    return replace(values, v_map_HRV=rotated_maps(values.v_map_HRV), weight_OK=weight_OK)


def reduced_heads(
    site: HeadSite,
    moments: HeadMoments,
    method: Method,
    widths: HeadWidths,
    held_out: HeadMoments | None = None,
    halves: Halves | None = None,
    *,
    scores_HD: Tensor | None = None,
) -> LinearReduced:
    """The new attention module, and a report for Q/K, unless they must stay, and for values that change. `scores_HD`
    rank dimensions of queries and keys, where they are known.
    """
    assert widths.qk == site.qk or not site.keeps_qk, (site.name, widths)
    assert widths.v == site.v or not site.keeps_v, (site.name, widths)
    if site.keeps_v and method.geometry == "square":
        method = replace(method, geometry="padded")  # where values are left as they are
    reports: list[SiteReport] = []
    if site.keeps_qk:
        recovery = kept_qk(moments)
    else:
        weight_XI = site.first.weight.detach().double()
        how: dict[str, Any] = {"in_planes": site.in_planes, "grouped": site.grouped, "scores_HD": scores_HD}
        at_site = qk_at_site(site.name, moments, method, weight_XI, widths.qk, halves, **how)
        recovery = at_site.recovery
        reports.append(qk_report(site.name, site.qk, at_site, method, widths.qk, held_out))
    weight_OC, bias_O = _projection(site)
    at_values = values_at_site(moments, method, weight_OC, bias_O, site.heads, widths.v, halves)
    values = at_values.recovery
    if site.keeps_qk or not leaves_values(method, widths.v, site.v):
        projection = (weight_OC, bias_O)
        reports.append(value_report(site.name, site.v, projection, at_values, moments, method, widths.v, held_out))
    recovery, values = _rotated(site, method, widths, recovery, values)
    maps = HeadMaps(
        q_HRD=recovery.q_map_HRD,
        k_HRD=recovery.k_map_HRD[:: site.grouped],
        v_HRD=values.v_map_HRV[:: site.grouped],
    )
    bias = None if site.first.bias is None else maps.applied(site.first.bias.detach())
    needs_bias = bias_O is not None or bool(values.bias_O.any())
    module, last = site.placed(
        widths,
        method.geometry,
        (maps.applied(site.first.weight.detach()), bias),
        (values.weight_OK, values.bias_O if needs_bias else None),
        recovery.planes_HK,
    )
    return LinearReduced(modules={site.name: module}, last=last, reports=reports)


def emptied_heads(
    site: HeadSite, moments: HeadMoments, method: Method, held_out: HeadMoments | None = None
) -> LinearReduced:
    """The mean of what the attention gives stays."""
    weight, bias = site.first.weight.detach(), site.first.bias
    module, last = site.placed(
        EMPTY_HEADS,
        method.geometry,
        (weight[:0], None if bias is None else bias.detach()[:0]),
        (site.last.weight.detach()[:, :0], mean_given(site.last, moments.z_mean_C)),
    )
    report = constant_report(
        site.name,
        "v",
        site.last,
        width_dense=site.v,
        width_asked=site.v * method.attention_kept,
        mean_K=moments.z_mean_C,
        covariance_KK=_covariance(moments),
        held_out=None if held_out is None else (held_out.z_mean_C, _covariance(held_out)),
    )
    return LinearReduced(modules={site.name: module}, last=last, reports=[report])


def _covariance(moments: HeadMoments) -> Tensor:
    """Of what enters the output projection."""
    return moments.z_second_CC - torch.outer(moments.z_mean_C, moments.z_mean_C)
