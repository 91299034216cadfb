"""The change that reduces a site: new weights for layers that read it, mixed rows for layers that write it.

Legend: C groups, M inputs of each, K groups kept, H heads, D rows of a head, R rows of it that are left, O outputs, U
columns of a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.queries_keys import QkRecovery
from corp_deploy.algebra.ridges import RidgeChoice
from corp_deploy.traced.finding.site_groups import Index
from corp_deploy.traced.models.pairs import Side
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import CalledLayer

from .reader_stats import ReaderStats
from .report import HeldOut, SiteReport


def site_report(
    site: str,
    part: str,
    widths: tuple[int, float, int],
    recovery: ChannelRecovery | QkRecovery,
    *,
    energy: float,
    held_out: HeldOut | None,
    ridge: RidgeChoice | None = None,
) -> SiteReport:
    """Return the report of a recovery; `widths`: dense, requested, resulting; `ridge`: the choice by halves, if any."""
    if isinstance(recovery, QkRecovery):
        before, after = float(recovery.residual_uncompensated_H.sum()), float(recovery.residual_H.sum())
    else:
        before, after = recovery.residual_uncompensated, recovery.residual
    dense, asked, left = widths
    return SiteReport(
        site=site,
        part=part,
        width_dense=dense,
        width_asked=asked,
        width=left,
        energy=energy,
        error_uncompensated=before,
        error=after,
        r2=recovery.r2,
        condition=recovery.condition,
        ridge=recovery.ridge,
        ridge_fit=ridge,
        held_out=held_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change of a layer that reads a site: its new weight on the kept groups' columns, and its new bias."""

    read: ReaderStats
    recovery: ChannelRecovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Rows of a tensor, mixed head by head by map_HRD.

    The results, plus `added_HR`, replace the rows `kept_HR` (None: the first ones of `rows_HD`); other rows become 0.
    """

    name: str
    dense: Tensor
    rows_HD: Tensor
    map_HRD: Tensor
    kept_HR: Tensor | None = None
    added_HR: Tensor | None = None


def map_layer(
    program: Program, rows: CalledLayer | Side, of_both: Mapping[str, Tensor], added_HR: Tensor | None = None
) -> tuple[Mapped, Mapped]:
    """Return the mixed rows of a layer's weight and of its bias, by the same map; `added_HR` is added to the bias."""
    weight, bias = (program.tensor(name).detach().double() for name in (rows.weight, rows.bias))
    of_bias = Mapped(name=rows.bias, dense=bias, added_HR=added_HR, **of_both)
    return Mapped(name=rows.weight, dense=weight, **of_both), of_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedReduced:
    """A reduced site with its reports: the groups `kept_K` stay, layers that read or write them change.

    `changes` are those of readers, `mapped` the mixed rows of writers. `selected`: groups are removed without any new
    weights. `beside`: by name the groups that other sites of the attention keep when this site removes whole heads.
    """

    reports: list[SiteReport]
    kept_K: Tensor
    selected: bool = False
    beside: Mapping[str, Index] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    mapped: tuple[Mapped, ...] = ()

    @property
    def is_narrower(self) -> bool:
        return bool(self.changes or self.mapped or self.selected)


def changed_tensors(new: Mapping[str, TracedReduced]) -> dict[str, Tensor]:
    """Return the weights and biases that all these sites change, by name, in dense sizes.

    Changes of a layer that reads several sites are added up.
    """
    tensors: dict[str, Tensor] = {}
    for kept_K, change in ((reduced.kept_K, change) for reduced in new.values() for change in reduced.changes):
        _add_change(tensors, change, kept_K)
    for mapped in (mapped for reduced in new.values() for mapped in reduced.mapped):
        _mix_rows(tensors, mapped)
    return tensors


def _mix_rows(tensors: dict[str, Tensor], mapped: Mapped) -> None:
    """Mix rows of a tensor as other sites have changed it so far; set removed rows to 0."""
    now = tensors.get(mapped.name, mapped.dense).clone()
    rows_HDI = now.flatten(1)[mapped.rows_HD] if now.dim() > 1 else now[mapped.rows_HD][..., None]
    mixed_HRI = mapped.map_HRD @ rows_HDI
    if mapped.added_HR is not None:
        mixed_HRI = mixed_HRI + mapped.added_HR[..., None]
    kept_HR = mapped.rows_HD[:, : mixed_HRI.shape[1]] if mapped.kept_HR is None else mapped.kept_HR
    now[mapped.rows_HD] = 0.0
    now[kept_HR] = mixed_HRI.view(*kept_HR.shape, *now.shape[1:])
    tensors[mapped.name] = now


def _add_change(tensors: dict[str, Tensor], change: Change, kept_K: Tensor) -> None:
    read, reading, recovery = change.read, change.read.reading, change.recovery
    layer = reading.layer
    assert layer.bias is not None, reading.name
    rows, weight = read.portion.rows, tensors.get(reading.weight, layer.weight.detach().double()).clone()
    columns_F = torch.from_numpy(read.portion.columns_CM).to(weight.device).flatten()
    change_OU = read.without_gain(read.as_dense_OU(recovery, kept_K) - read.weight_OU)
    weight[rows] = weight[rows].index_add(
        1, columns_F, change_OU.view(len(change_OU), len(columns_F), *weight.shape[2:])
    )
    bias_O = tensors.get(reading.bias, layer.bias.detach().double()).clone()
    bias_O[rows] += read.without_gain(recovery.bias_O - read.bias_O)
    tensors |= {reading.weight: weight, reading.bias: bias_O}


def groups_left(narrower: Mapping[str, TracedReduced]) -> dict[str, Index]:
    """Return, by site, the groups that all reductions keep: the site's own, and others' that remove whole heads."""
    left = {name: each.kept_K.cpu().numpy() for name, each in narrower.items()}
    for name, groups in (item for each in narrower.values() for item in each.beside.items()):
        left[name] = np.intersect1d(left.get(name, groups), groups)
    return left
