"""What becomes of a traced model where a site is reduced: layers that read it change, rows that write it are mixed.

Legend: C groups, M inputs of each, K groups kept, H heads, D rows of one, R rows of it that are left, O outputs, U
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
    """`widths`: the dense one, that asked for and that left; `ridge`: chosen by halves of the images."""
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
    """What a layer that reads a site becomes: its weight's columns [K M] and by how much its bias differs."""

    read: ReaderStats
    recovery: ChannelRecovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Rows of a tensor that become mixtures of themselves, head by head, by map_HRD: those numbered `kept_HR`, None for
    the first ones of `rows_HD`; with `added_HR`.
    """

    name: str
    dense: Tensor
    rows_HD: Tensor
    map_HRD: Tensor
    kept_HR: Tensor | None = None
    added_HR: Tensor | None = None


def mapped_layer(
    program: Program, rows: CalledLayer | Side, of_both: Mapping[str, Tensor], added_HR: Tensor | None = None
) -> tuple[Mapped, Mapped]:
    """The weight and the bias of a layer, whose rows are mixed alike; `added_HR`: to the biases."""
    weight, bias = (program.tensor(name).detach().double() for name in (rows.weight, rows.bias))
    of_bias = Mapped(name=rows.bias, dense=bias, added_HR=added_HR, **of_both)
    return Mapped(name=rows.weight, dense=weight, **of_both), of_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedReduced:
    """A site of which the groups `kept_K` stay, with what to report: layers that read them change, and rows that write
    them are mixed. `selected`: groups go where nothing changes but that. `beside`: by name the groups of other sites
    that are left with whole heads gone.
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
    """The weights and biases that all these sites change, by their names, of dense sizes: what changes of a layer that
    reads several sites is added up.
    """
    tensors: dict[str, Tensor] = {}
    for kept_K, change in ((reduced.kept_K, change) for reduced in new.values() for change in reduced.changes):
        _add(tensors, change, kept_K)
    for mapped in (mapped for reduced in new.values() for mapped in reduced.mapped):
        _map(tensors, mapped)
    return tensors


def _map(tensors: dict[str, Tensor], mapped: Mapped) -> None:
    """On what the layer is by now; rows that go are 0, as a narrower program has them."""
    now = tensors.get(mapped.name, mapped.dense).clone()
    rows_HDI = now.flatten(1)[mapped.rows_HD] if now.dim() > 1 else now[mapped.rows_HD][..., None]
    mixed_HRI = mapped.map_HRD @ rows_HDI
    if mapped.added_HR is not None:
        mixed_HRI = mixed_HRI + mapped.added_HR[..., None]
    kept_HR = mapped.rows_HD[:, : mixed_HRI.shape[1]] if mapped.kept_HR is None else mapped.kept_HR
    now[mapped.rows_HD] = 0.0
    now[kept_HR] = mixed_HRI.view(*kept_HR.shape, *now.shape[1:])
    tensors[mapped.name] = now


def _add(tensors: dict[str, Tensor], change: Change, kept_K: Tensor) -> None:
    read, reading, recovery = change.read, change.read.reading, change.recovery
    layer = reading.layer
    assert layer.bias is not None, reading.name
    rows, weight = read.portion.rows, tensors.get(reading.weight, layer.weight.detach().double()).clone()
    columns_F = torch.from_numpy(read.portion.columns_CM).to(weight.device).flatten()
    change_OU = read.undone(read.as_dense_OU(recovery, kept_K) - read.weight_OU)
    weight[rows] = weight[rows].index_add(
        1, columns_F, change_OU.view(len(change_OU), len(columns_F), *weight.shape[2:])
    )
    bias_O = tensors.get(reading.bias, layer.bias.detach().double()).clone()
    bias_O[rows] += read.undone(recovery.bias_O - read.bias_O)
    tensors |= {reading.weight: weight, reading.bias: bias_O}


def groups_left(narrower: Mapping[str, TracedReduced]) -> dict[str, Index]:
    """The groups that every site leaves of itself, and of others."""
    left = {name: each.kept_K.cpu().numpy() for name, each in narrower.items()}
    for name, groups in (item for each in narrower.values() for item in each.beside.items()):
        left[name] = np.intersect1d(left.get(name, groups), groups)
    return left
