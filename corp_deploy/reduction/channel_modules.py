"""A channel site's layers in and out of a model: its dense ones as tensors, its new ones as modules with a report."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.modules import fill_, fill_rows_

from . import channels
from .channels import ChannelLayers, ChannelsAtSite, output_energy
from .emptied import constant_report, mean_given
from .kind import LinearReduced
from .method import Method
from .report import HeldOut, SiteReport, ridge_fit


def _by_channel(rows: Tensor, each: int) -> Tensor:
    """The rows of the first layers [each * F,I] in float64, those of a channel side by side [F,each * I]."""
    return torch.cat(rows.detach().double().chunk(each), dim=1)


def layers_of(site: ChannelSite) -> ChannelLayers:
    """The MLP's dense layers in float64; what makes a channel of a gated one stands side by side."""
    first = site.first if site.up is None else site.stacked_first()
    return ChannelLayers(
        first_FI=_by_channel(first.weight, site.rows),
        first_bias_F=None if first.bias is None else _by_channel(first.bias[:, None], site.rows).squeeze(1),
        second_OF=site.last.weight.detach().double(),
        second_bias_O=None if site.last.bias is None else site.last.bias.detach().double(),
    )


def placed(
    site: ChannelSite, first_KI: Tensor, first_bias_K: Tensor | None, weight_OK: Tensor, bias_O: Tensor
) -> dict[str, nn.Linear]:
    """All layers with these weights, the last one last, by module name; that has a bias where it needs one."""
    needs_bias = site.last.bias is not None or bool(bias_O.any())
    modules = site.empty(first_KI.shape[0], output_bias=needs_bias)
    *firsts, last = modules.values()
    rows = torch.cat(first_KI.chunk(site.rows, dim=1))
    bias = None if first_bias_K is None else first_bias_K.view(len(first_KI), site.rows).T.flatten()
    fill_rows_(firsts, rows, bias)
    fill_(last, weight_OK, bias_O)
    return modules


def channel_report(
    site: ChannelSite, method: Method, recovery: ChannelRecovery, energy: float, held_out: HeldOut | None
) -> SiteReport:
    """What happened to one MLP."""
    return SiteReport(
        site=site.name,
        part="mlp",
        width_dense=site.width,
        width_asked=site.width * method.mlp_kept,
        width=recovery.weight_OK.shape[1],
        energy=energy,
        error_uncompensated=recovery.residual_uncompensated,
        error=recovery.residual,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        held_out=held_out,
    )


def emptied(
    site: ChannelSite, moments: ChannelMoments, method: Method, held_out: ChannelMoments | None = None
) -> LinearReduced:
    """Both layers without channels: the mean of what the MLP gives stays."""
    layers, mean_O = layers_of(site), mean_given(site.last, moments.mean_F)
    bias_K = None if layers.first_bias_F is None else layers.first_bias_F[:0]
    modules = placed(site, layers.first_FI[:0], bias_K, layers.second_OF[:, :0], mean_O)
    report = constant_report(
        site.name,
        "mlp",
        site.last,
        width_dense=site.width,
        width_asked=site.width * method.mlp_kept,
        mean_K=moments.mean_F,
        covariance_KK=moments.covariance_FF,
        held_out=None if held_out is None else (held_out.mean_F, held_out.covariance_FF),
    )
    kept_K = moments.sum_F.new_zeros(0, dtype=torch.int64)
    return LinearReduced(modules={**modules}, last=modules[site.last_name], reports=[report], kept_K=kept_K)


def built(
    site: ChannelSite,
    new: ChannelsAtSite,
    moments: ChannelMoments,
    method: Method,
    held_out: ChannelMoments | None = None,
    layers: ChannelLayers | None = None,
) -> LinearReduced:
    """The linear layers that were decided on as modules, and the site's report; `layers` are what they stand for, by
    default the dense ones.
    """
    layers = layers or layers_of(site)
    modules = placed(site, new.first_KI, new.first_bias_K, new.recovery.weight_OK, new.recovery.bias_O)
    judged = None
    if held_out is not None:
        error = channels.error_of(new, layers, held_out)
        judged = HeldOut(energy=output_energy(held_out, layers), error=error)
    report = channel_report(site, method, new.recovery, output_energy(moments, layers), judged)
    report = replace(report, ridge_fit=ridge_fit(new.ridge))
    return LinearReduced(modules={**modules}, last=modules[site.last_name], reports=[report], kept_K=new.kept_K)
