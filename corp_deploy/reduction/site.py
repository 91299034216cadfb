"""One site's new modules, their weights set, with its reports."""

import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments, HeadMoments
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.values import ValueRecovery
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths, geometry_of_heads

from . import channels as reduce_mlp
from . import heads as reduce_attention
from .channels import ChannelLayers, ChannelsAtSite, mlp_at_site, output_energy
from .heads import HeadMaps, QkAtSite, kept_qk, leaves_values, qk_at_site, values_at_site
from .method import Method
from .report import HeldOut, SiteReport


@torch.no_grad()
def fill(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Set a new linear layer; the one place where float64 results become the model's type."""
    linear.weight.copy_(weight)
    if linear.bias is not None:
        assert bias is not None, "a layer with bias needs one"
        linear.bias.copy_(bias)


def layers_of(part: vit.ChannelSite) -> ChannelLayers:
    """The MLP's dense layers in float64."""
    return ChannelLayers(
        first_FI=part.fc1.weight.detach().double(),
        first_bias_F=None if part.fc1.bias is None else part.fc1.bias.detach().double(),
        second_OF=part.fc2.weight.detach().double(),
        second_bias_O=None if part.fc2.bias is None else part.fc2.bias.detach().double(),
    )


def placed_mlp(
    part: vit.ChannelSite, first_KI: Tensor, first_bias_K: Tensor | None, weight_OK: Tensor, bias_O: Tensor
) -> dict[str, nn.Linear]:
    """fc1 and fc2 with these weights, by module name; fc2 has a bias where it had one or needs one."""
    needs_bias = part.fc2.bias is not None or bool(bias_O.any())
    modules = vit.empty_mlp(part, hidden=first_KI.shape[0], output_bias=needs_bias)
    fc1, fc2 = modules.values()
    fill(fc1, first_KI, first_bias_K)
    fill(fc2, weight_OK, bias_O)
    return modules


def mlp_report(
    part: vit.ChannelSite, method: Method, recovery: ChannelRecovery, energy: float, held_out: HeldOut | None
) -> SiteReport:
    """What happened to one MLP."""
    return SiteReport(
        site=part.name,
        part="mlp",
        width_dense=part.hidden,
        width_asked=part.hidden * method.mlp_kept,
        width=recovery.weight_OK.shape[1],
        energy=energy,
        error_uncompensated=recovery.residual_uncompensated,
        error=recovery.residual,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        held_out=held_out,
    )


def built_mlp(
    part: vit.ChannelSite,
    new: ChannelsAtSite,
    moments: ChannelMoments,
    method: Method,
    held_out: ChannelMoments | None = None,
) -> tuple[dict[str, nn.Linear], SiteReport]:
    """The linear layers that were decided on as modules by name, and the site's report."""
    layers = layers_of(part)
    modules = placed_mlp(part, new.first_KI, new.first_bias_K, new.recovery.weight_OK, new.recovery.bias_O)
    judged = None
    if held_out is not None:
        error = reduce_mlp.error_of(new, layers, held_out)
        judged = HeldOut(energy=output_energy(held_out, layers), error=error)
    return modules, mlp_report(part, method, new.recovery, output_energy(moments, layers), judged)


def reduced_mlp(
    part: vit.ChannelSite,
    moments: ChannelMoments,
    method: Method,
    width: int,
    known: Elimination | None = None,
    held_out: ChannelMoments | None = None,
) -> tuple[dict[str, nn.Linear], SiteReport]:
    """New fc1 and fc2 of one MLP by module name, and the site's report."""
    new = mlp_at_site(moments, layers_of(part), method, width, known)
    return built_mlp(part, new, moments, method, held_out)


def _qk_held_out(site: str, recovery: QkRecovery, held_out: HeadMoments, method: Method) -> HeldOut:
    error_H = reduce_attention.logit_error(site, held_out, method, recovery.q_map_HRD, recovery.k_map_HRD)
    energy_H = reduce_attention.logit_scale(site, held_out, method)
    return HeldOut(energy=float(energy_H.sum()), error=float(error_H.sum()))


def _qk_report(
    part: vit.HeadSite, at_site: QkAtSite, method: Method, width: int, held_out: HeadMoments | None
) -> SiteReport:
    recovery = at_site.recovery
    return SiteReport(
        site=part.name,
        part="qk",
        width_dense=part.qk,
        width_asked=part.qk * method.attention_kept,
        width=width,
        energy=float(at_site.energy_H.sum()),
        error_uncompensated=float(recovery.residual_uncompensated_H.sum()),
        error=float(recovery.residual_H.sum()),
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        held_out=None if held_out is None else _qk_held_out(part.name, recovery, held_out, method),
    )


def _value_report(
    part: vit.HeadSite,
    values: ValueRecovery,
    moments: HeadMoments,
    method: Method,
    width: int,
    held_out: HeadMoments | None,
) -> SiteReport:
    weight_OC, bias_O = _projection(part)
    return SiteReport(
        site=part.name,
        part="v",
        width_dense=part.v,
        width_asked=part.v * method.attention_kept,
        width=width,
        energy=reduce_attention.output_energy(moments, weight_OC),
        error_uncompensated=values.residual_uncompensated,
        error=values.residual,
        r2=values.r2,
        condition=values.condition,
        ridge=values.ridge,
        held_out=None
        if held_out is None
        else HeldOut(
            energy=reduce_attention.output_energy(held_out, weight_OC),
            error=reduce_attention.error_of(values, weight_OC, bias_O, held_out),
        ),
    )


def _projection(part: vit.HeadSite) -> tuple[Tensor, Tensor | None]:
    """The output projection's dense weight and bias in float64."""
    bias_O = None if part.proj.bias is None else part.proj.bias.detach().double()
    return part.proj.weight.detach().double(), bias_O


def reduced_attention(
    part: vit.HeadSite,
    moments: HeadMoments,
    method: Method,
    widths: HeadWidths,
    held_out: HeadMoments | None = None,
) -> tuple[dict[str, nn.Module], list[SiteReport]]:
    """The new attention module by name, and a report for Q/K, unless they must stay, and for values that change."""
    assert widths.qk == part.qk or not part.keeps_qk, (part.name, widths)
    reports: list[SiteReport] = []
    if part.keeps_qk:
        recovery = kept_qk(moments)
    else:
        at_site = qk_at_site(part.name, moments, method, part.qkv.weight.detach().double(), widths.qk)
        recovery = at_site.recovery
        reports.append(_qk_report(part, at_site, method, widths.qk, held_out))
    weight_OC, bias_O = _projection(part)
    values = values_at_site(moments, method, weight_OC, bias_O, part.heads, widths.v)
    if part.keeps_qk or not leaves_values(method, widths.v, part.v):
        reports.append(_value_report(part, values, moments, method, widths.v, held_out))
    geometry = geometry_of_heads(widths, method.geometry)
    needs_bias = bias_O is not None or bool(values.bias_O.any())
    module = vit.empty_attention(part, qk=widths.qk, v=widths.v, geometry=geometry, proj_bias=needs_bias)
    maps = HeadMaps(q_HRD=recovery.q_map_HRD, k_HRD=recovery.k_map_HRD, v_HRD=values.v_map_HRV)
    bias = None if part.qkv.bias is None else maps.applied(part.qkv.bias.detach())
    fill(module.qkv, maps.applied(part.qkv.weight.detach()), bias)
    fill(module.proj, values.weight_OK, values.bias_O)
    return {part.name: module}, reports
