"""Coupled channels, removed before anything else: one kept set a stream, every reader compensated by itself.

Legend: C channels of a stream, K kept, T places of a kernel, O outputs of a reader, U = C T columns, X = O T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import ChannelMoments, Moments, on_device
from calib.patch_moments import PatchMoments
from corp_deploy.algebra import channels, scores
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.coupled import eliminate_coupled
from corp_deploy.algebra.quadratic import variance
from corp_deploy.families.convolution import Convolution
from corp_deploy.families.coupled_site import CoupledSite, Reader
from corp_deploy.families.family import sites_of
from corp_deploy.families.modules import device, fill_, replaced
from corp_deploy.families.squeeze import SqueezeExcite
from ground.effort import Stopwatch, turn
from ground.errors import BadInput

from .conv_channels import Reading, output_energy, recovered
from .kind import Reduced
from .method import Method
from .report import SiteReport
from .squeezes import narrowed_squeeze

_OF_VECTORS: Mapping[str, Any] = MappingProxyType(
    {
        "none": channels.none,
        "bias": channels.bias,
        "gram": channels.gram,
        "affine": channels.affine,
        "im2col": channels.affine,
    }
)
"""What a recovery is where a layer of vectors reads the channels: there are no borders."""


def _statistics(path: str, moments: Moments, where: torch.device) -> PatchMoments | ChannelMoments:
    own = moments.sites.get(path)
    if not isinstance(own, PatchMoments | ChannelMoments):
        raise BadInput(
            f"{path}: the moments hold no statistics of the stream that it reads; calibrate again with --residual"
        )
    return on_device(own, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A reader with its statistics, its weights [X,C] and the channels' covariance as it sees them."""

    module: Reader
    moments: PatchMoments | ChannelMoments
    weight_XC: Tensor
    second_CC: Tensor
    mean_C: Tensor

    @property
    def covariance_CC(self) -> Tensor:
        return self.second_CC - torch.outer(self.mean_C, self.mean_C)

    @property
    def energy(self) -> float:
        return variance(self.weight_XC, self.covariance_CC)


def _read(module: Reader, moments: PatchMoments | ChannelMoments) -> _Read:
    weight = module.weight.detach().double()
    if isinstance(moments, ChannelMoments):
        return _Read(
            module=module, moments=moments, weight_XC=weight, second_CC=moments.second_FF, mean_C=moments.mean_F
        )
    return _Read(
        module=module,
        moments=moments,
        weight_XC=weight.flatten(2).transpose(1, 2).flatten(0, 1),
        second_CC=moments.map_second_GCC[0],
        mean_C=moments.map_mean_GC[0],
    )


def _active_share(moments: PatchMoments | ChannelMoments) -> Tensor:
    """How often each channel is on [C]."""
    return moments.active_share_F if isinstance(moments, ChannelMoments) else moments.active_share_GC[0]


def _scores(read: _Read, method: Method) -> Tensor:
    """Of every channel [C], by one reader."""
    second_C = read.second_CC.diagonal()
    match method.conv_selection:
        case "active":
            return scores.active(_active_share(read.moments))
        case "energy":
            return scores.energy(second_C)
        case "variance":
            return scores.variance(read.covariance_CC.diagonal())
        case "magnitude":
            return scores.magnitude(read.weight_XC)
        case "combined":
            return scores.combined(second_C, read.weight_XC)
        case _:
            return scores.wanda(second_C, read.weight_XC)


def _shares(score_C: Tensor) -> Tensor:
    """Of their sum; none of a reader to which nothing matters."""
    total = score_C.sum()
    return torch.where(total > 0.0, score_C / total, torch.zeros_like(score_C))


def kept_together(site: CoupledSite, reads: list[_Read], method: Method, width: int) -> Tensor:
    """One kept set: by elimination over all readers, or by scores summed over them, each as a share of its sum."""
    if method.conv_selection == "obs":
        order = eliminate_coupled(
            [read.covariance_CC for read in reads], [read.weight_XC for read in reads], ridge_rel=method.ridge_rel
        )
        return order.kept(width)
    if method.conv_selection in ("producer-l1", "producer-l2"):
        rows_CX = torch.cat([each.weight.detach().double().flatten(1) for each in site.writers.values()], dim=1)
        score = scores.producer_l1 if method.conv_selection == "producer-l1" else scores.producer_l2
        return scores.kept_from_scores(score(rows_CX), width)
    by_reader = [_scores(read, method) for read in reads]
    return scores.kept_from_scores(torch.stack([_shares(each) for each in by_reader]).sum(dim=0), width)


def _recovered(read: _Read, method: Method, kept_K: Tensor) -> tuple[ChannelRecovery, float]:
    """The reader on the kept channels, and the variance of what it gives."""
    bias_O = None if read.module.bias is None else read.module.bias.detach().double()
    weight = read.module.weight.detach().double()
    if isinstance(read.moments, ChannelMoments):
        own = read.moments
        recover = _OF_VECTORS[method.conv_recovery]
        new: ChannelRecovery = recover(own.mean_F, own.second_FF, weight, bias_O, kept_K, ridge_rel=method.ridge_rel)
        return new, variance(weight, own.covariance_FF)
    assert bias_O is not None, read.module
    # Which rows write the channels is asked of no recovery.
    reading = Reading(weight_GPU=weight.flatten(1)[None], bias_O=bias_O, writing_FX=read.weight_XC.T, groups=1)
    kept = recovered(read.moments, reading, method, kept_K, method.ridge_rel)
    return kept.recovery, output_energy(read.moments, reading)


@torch.no_grad()
def _fill_(
    path: str, dense: nn.Module, new: nn.Module, kept_K: Tensor, recoveries: Mapping[str, ChannelRecovery]
) -> None:
    """Set a module that writes the channels, stands along them, or reads them."""
    if isinstance(new, nn.Linear):
        fill_(new, recoveries[path].weight_OK, recoveries[path].bias_O)
        return
    assert isinstance(new, Convolution), (path, new)
    assert isinstance(dense, Convolution), (path, dense)
    assert dense.bias is not None, path
    weight_OIHW, bias_O = dense.weight.detach().double(), dense.bias.detach().double()
    if path in recoveries:
        kernel = dense.kernel_size
        weight_OIHW = recoveries[path].weight_OK.unflatten(-1, (-1, *kernel))
        bias_O = recoveries[path].bias_O
    if new.out_channels != dense.out_channels:
        weight_OIHW, bias_O = weight_OIHW[kept_K], bias_O[kept_K]
    new.fill_(weight_OIHW, bias_O)


def _squeezed(path: str, dense: SqueezeExcite, moments: Moments, method: Method, kept_K: Tensor) -> SqueezeExcite:
    own = _statistics(path, moments, dense.reduce.weight.device)
    assert isinstance(own, ChannelMoments), path
    return narrowed_squeeze(dense, kept_K, own, method)


def _report(
    site: CoupledSite, reader: str, method: Method, kept: int, recovery: ChannelRecovery, energy: float
) -> SiteReport:
    return SiteReport(
        site=site.name,
        part=f"read by {reader}",
        width_dense=site.width,
        width_asked=site.width * method.residual_kept,
        width=kept,
        energy=energy,
        error_uncompensated=recovery.residual_uncompensated,
        error=recovery.residual,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
    )


def reduced_stream(
    site: CoupledSite,
    moments: Moments,
    method: Method,
    width: int,
    where: torch.device,
    watch: Stopwatch | None = None,
) -> Reduced:
    """New modules by path, at one width, repaired by the dense model's moments."""
    reads = {path: _read(reader, _statistics(path, moments, where)) for path, reader in site.readers.items()}
    with turn(watch, "select"):
        kept_K = kept_together(site, list(reads.values()), method, width)
    modules, recoveries, reports = site.at_width(width), dict[str, ChannelRecovery](), list[SiteReport]()
    for path, read in reads.items():
        recoveries[path], energy = _recovered(read, method, kept_K)
        reports.append(_report(site, path, method, width, recoveries[path], energy))
    dense = {**site.writers, **site.along, **site.readers}
    for path, new in modules.items():
        old = dense[path]
        if isinstance(old, SqueezeExcite):
            modules[path] = _squeezed(path, old, moments, method, kept_K)
        else:
            _fill_(path, old, new, kept_K, recoveries)
    return Reduced(modules=modules, reports=reports, kept=dict.fromkeys((*site.writers, *site.along), kept_K))


def with_fewer_coupled(
    model: nn.Module, moments: Moments, method: Method, watch: Stopwatch | None = None
) -> tuple[nn.Module, list[SiteReport], dict[str, Tensor]]:
    """A copy of the model whose streams have the method's share of their channels, a report a reader, and by path which
    outputs stay. One stream after the other: a convolution between two of them has both its sides changed.
    """
    reports, kept = list[SiteReport](), dict[str, Tensor]()
    for name in [site.name for site in sites_of(model).coupled]:
        site = next(each for each in sites_of(model).coupled if each.name == name)
        width = site.kept(method.residual_kept, method.align_conv)
        if width == site.width:
            continue
        new = reduced_stream(site, moments, method, width, device(model), watch)
        model = replaced(model, new.modules).eval().requires_grad_(False)
        reports += new.reports
        kept |= new.kept
    return model, reports, kept
