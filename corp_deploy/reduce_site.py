"""One site's new modules, their weights set, with its reports."""

import torch
from torch import Tensor, nn

from calib.moments import AttentionMoments, MlpMoments

from . import reduce_attention, reduce_mlp, vit
from .choices import Choices, HeadWidths
from .obs import Elimination
from .recover_attention import QkRecovery
from .reduce_attention import HeadMaps, leaves_values, qk_at_site, values_at_site
from .reduce_mlp import MlpLayers, mlp_at_site, output_energy
from .site_report import HeldOut, SiteReport


@torch.no_grad()
def fill(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Set a new linear layer; the one place where float64 results become the model's type."""
    linear.weight.copy_(weight)
    if linear.bias is not None:
        assert bias is not None, "a layer with bias needs one"
        linear.bias.copy_(bias)


def layers_of(part: vit.MlpPart) -> MlpLayers:
    """The MLP's dense layers in float64."""
    return MlpLayers(
        first_FI=part.fc1.weight.detach().double(),
        first_bias_F=None if part.fc1.bias is None else part.fc1.bias.detach().double(),
        second_OF=part.fc2.weight.detach().double(),
        second_bias_O=None if part.fc2.bias is None else part.fc2.bias.detach().double(),
    )


def reduced_mlp(
    part: vit.MlpPart,
    moments: MlpMoments,
    choices: Choices,
    width: int,
    known: Elimination | None = None,
    held_out: MlpMoments | None = None,
) -> tuple[dict[str, nn.Linear], SiteReport]:
    """New fc1 and fc2 of one MLP by module name, and the site's report."""
    layers = layers_of(part)
    new = mlp_at_site(moments, layers, choices, width, known)
    needs_bias = layers.second_bias_O is not None or bool(new.recovery.bias_O.any())
    modules = vit.empty_mlp(part, hidden=width, output_bias=needs_bias)
    fc1, fc2 = modules.values()
    fill(fc1, new.first_KI, new.first_bias_K)
    fill(fc2, new.recovery.weight_OK, new.recovery.bias_O)
    report = SiteReport(
        site=part.name,
        part="mlp",
        width_dense=part.hidden,
        width_asked=part.hidden * choices.mlp_kept,
        width=width,
        energy=output_energy(moments, layers),
        error_uncompensated=new.recovery.residual_uncompensated,
        error=new.recovery.residual,
        r2=new.recovery.r2,
        condition=new.recovery.condition,
        ridge=new.recovery.ridge,
        held_out=None
        if held_out is None
        else HeldOut(energy=output_energy(held_out, layers), error=reduce_mlp.error_of(new, layers, held_out)),
    )
    return modules, report


def _qk_held_out(site: str, recovery: QkRecovery, held_out: AttentionMoments, choices: Choices) -> HeldOut:
    error_H = reduce_attention.logit_error(site, held_out, choices, recovery.q_map_HRD, recovery.k_map_HRD)
    energy_H = reduce_attention.logit_scale(site, held_out, choices)
    return HeldOut(energy=float(energy_H.sum()), error=float(error_H.sum()))


def reduced_attention(
    part: vit.AttentionPart,
    moments: AttentionMoments,
    choices: Choices,
    widths: HeadWidths,
    held_out: AttentionMoments | None = None,
) -> tuple[dict[str, nn.Module], list[SiteReport]]:
    """The new attention module by name, and a report each for Q/K and, where they change, the values."""
    at_site = qk_at_site(part.name, moments, choices, part.qkv.weight.detach().double(), widths.qk)
    weight_OC = part.proj.weight.detach().double()
    bias_O = None if part.proj.bias is None else part.proj.bias.detach().double()
    values = values_at_site(moments, choices, weight_OC, bias_O, part.heads, widths.v)
    geometry = "square" if widths.qk == widths.v else choices.geometry
    needs_bias = bias_O is not None or bool(values.bias_O.any())
    module = vit.empty_attention(part, qk=widths.qk, v=widths.v, geometry=geometry, proj_bias=needs_bias)
    maps = HeadMaps(q_HRD=at_site.recovery.q_map_HRD, k_HRD=at_site.recovery.k_map_HRD, v_HRD=values.v_map_HRV)
    bias = None if part.qkv.bias is None else maps.applied(part.qkv.bias.detach())
    fill(module.qkv, maps.applied(part.qkv.weight.detach()), bias)
    fill(module.proj, values.weight_OK, values.bias_O)
    reports = [
        SiteReport(
            site=part.name,
            part="qk",
            width_dense=part.qk,
            width_asked=part.qk * choices.attention_kept,
            width=widths.qk,
            energy=float(at_site.energy_H.sum()),
            error_uncompensated=float(at_site.recovery.residual_uncompensated_H.sum()),
            error=float(at_site.recovery.residual_H.sum()),
            r2=at_site.recovery.r2,
            condition=at_site.recovery.condition,
            ridge=at_site.recovery.ridge,
            held_out=None if held_out is None else _qk_held_out(part.name, at_site.recovery, held_out, choices),
        )
    ]
    if not leaves_values(choices, widths.v, part.v):
        reports.append(
            SiteReport(
                site=part.name,
                part="v",
                width_dense=part.v,
                width_asked=part.v * choices.attention_kept,
                width=widths.v,
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
        )
    return {part.name: module}, reports
