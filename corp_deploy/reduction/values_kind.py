"""The kind of values of traced models: the algebra of heads on the rows and the layer around them.

Legend: H heads, V dimensions of a head, R kept, C = H V, O outputs of the layer that reads them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corp_deploy.algebra import values
from corp_deploy.algebra.block_obs import eliminate_blocks
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.patches import columns
from corp_deploy.algebra.rotation import rotate_maps, rotate_weight
from corp_deploy.spec.widths import aligned_width, aligned_widths
from corp_deploy.traced.finding.site_groups import Index
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.values import TracedValues

from .change import Change, Mapped, TracedReduced, map_layer, site_report
from .heads import HeadOutputs, kept_groups, recover_heads, recover_values
from .method import Method
from .reader_kind import Reads, TracedKind
from .reader_stats import ReaderStats
from .report import SiteReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """Heads of a site: their groups, the rows that produce them, and moments of the input of the layer that reads them.

    `own` are the moments of the fit, `splits` those of two halves of its images.
    """

    groups_HV: Tensor
    rows_HV: Tensor
    read: ReaderStats
    own: HeadOutputs
    held_out: HeadOutputs | None
    splits: tuple[HeadOutputs, HeadOutputs] | None

    @property
    def taps(self) -> int:
        return self.own.weight_OC.shape[1] // self.groups_HV.numel()

    def fewer(self, kept_M: Tensor, recovery: ChannelRecovery) -> "_Heads":
        """Return the heads `kept_M` alone, with the recovered layer that reads them."""
        number_HX = torch.arange(self.own.weight_OC.shape[1], device=kept_M.device).view(len(self.groups_HV), -1)
        kept_K, splits = number_HX[kept_M].flatten(), self.splits
        return replace(
            self,
            groups_HV=self.groups_HV[kept_M.cpu()],
            rows_HV=self.rows_HV[kept_M.cpu()],
            own=self.own.at(kept_K, recovery),
            held_out=self.held_out and self.held_out.at(kept_K, recovery),
            splits=splits and (splits[0].at(kept_K, recovery), splits[1].at(kept_K, recovery)),
        )

    def kept_K(self, each: int) -> Tensor:
        """Return the first `each` groups of every head, ascending."""
        return self.groups_HV[:, :each].flatten().sort().values.to(self.own.weight_OC.device)

    def chosen(self, method: Method, each: int) -> Tensor:
        """Return the `each` groups of every head that backward elimination keeps, ascending."""
        heads, dense = self.groups_HV.shape
        part_C = torch.arange(heads, device=self.own.weight_OC.device).repeat_interleave(dense)
        order = eliminate_blocks(
            self.own.z_covariance_CC, self.own.weight_OC, self.taps, ridge_rel=method.ridge_rel, group_of_C=part_C
        )
        kept_K = order.kept(heads * each)
        return self.groups_HV.flatten().to(kept_K.device)[kept_K].sort().values

    def reduced(
        self, recovery: ChannelRecovery, reports: list[SiteReport], mapped: tuple[Mapped, ...] = ()
    ) -> TracedReduced:
        """Return the reduced site, given the recovered layer on the first groups of each head, head by head."""
        each = recovery.weight_OK.shape[1] // (len(self.groups_HV) * self.taps)
        order_K = columns(self.groups_HV[:, :each].flatten().argsort(), self.taps).to(recovery.weight_OK.device)
        change = Change(read=self.read, recovery=replace(recovery, weight_OK=recovery.weight_OK[:, order_K]))
        return TracedReduced(reports=reports, kept_K=self.kept_K(each), changes=(change,), mapped=mapped)


class TracedValuesKind(TracedKind[TracedValues]):
    """Values, as a Kind; dimensions are mixed, or only chosen if the model does not allow a mixture."""

    def __init__(self) -> None:
        super().__init__("values")

    def sparsity(self, method: Method) -> float | None:
        return method.heads_sparsity or method.attention_sparsity

    def refusal(self, site: TracedValues, method: Method) -> str:
        """Return why the attention can't be narrowed as the method asks, an empty text if it can or needn't be.

        Either no head can be removed, or its queries and keys, which are not a site, stay.
        """
        if reason := self._keeps_heads(site, method):
            return reason
        is_narrowed = method.geometry == "square" or method.heads_sparsity or site.beside
        if is_narrowed or not (method.attention_sparsity and method.reduces_attention):
            return ""
        why = f": {site.queries_mixed}" if site.queries_mixed else ""
        return f"queries and keys stay{why}; --heads square reduces its values"

    def _keeps_heads(self, site: TracedValues, method: Method) -> str:
        """Return why no head can be removed though some should be, or an empty text."""
        if not method.heads_sparsity or site.groups.part_G is None:
            return ""
        if sum(len(each.portions) for each in site.readings) > 1:
            return "several layers read its values, and one repair of whole heads is known"
        found = site.units() if method.folds_heads else site.with_heads()
        return found if isinstance(found, str) else ""

    def note(self, site: TracedValues, method: Method, width: int | None) -> str | None:
        reason = "" if width not in (None, site.width) else self.refusal(site, method)
        return f"{site.name} kept as it is: {reason}" if reason else None

    def heads_left(self, site: TracedValues, method: Method) -> int:
        """Return how many heads stay, before dimensions of them are removed."""
        heads = len(site.groups_HV)
        return heads if self._keeps_heads(site, method) else method.heads_left(heads)

    def uniform(self, site: TracedValues, method: Method) -> int | None:
        """Return the width of all heads left, None if the method neither removes heads nor makes them square.

        Square heads are as wide as the queries, if those can be narrowed.
        """
        heads, dense = site.groups_HV.shape
        left = self.heads_left(site, method)
        if method.geometry != "square" or not method.reduces_attention:
            return left * dense if left < heads else None
        return (
            left
            * _width_beside(site, aligned_width(_square_width(site), method.attention_kept, method.align_head))
            // heads
        )

    def widths(self, site: TracedValues, method: Method) -> tuple[int, ...]:
        """Return the widths of all heads: at the queries' aligned widths if heads are square, else at their own."""
        if method.geometry != "square":
            return super().widths(site, method)
        return tuple(_width_beside(site, size) for size in aligned_widths(_square_width(site), method.align_head))

    def offers(self, site: TracedValues, method: Method) -> tuple[int, ...]:
        stays = method.value_recovery == "keep" or self._keeps_heads(site, method)
        return (site.width,) if stays else self._with_none(site, method)

    def chosen(self, site: TracedValues, moments: Any, method: Method, width: int, cached: Any = None) -> Tensor | None:
        is_chosen = site.rows is None and not method.heads_sparsity
        return super().chosen(site, moments, method, width, cached) if is_chosen else None

    def reduced(
        self,
        site: TracedValues,
        moments: Reads,
        method: Method,
        width: int,
        *,
        cached: Elimination | Tensor | None = None,
        held_out: Reads | None = None,
        splits: tuple[Reads, Reads] | None = None,
    ) -> TracedReduced:
        if width == 0:
            new = super().reduced(site, moments, method, width, held_out=held_out)
            return replace(new, beside=site.queries_gone)
        heads, dense = site.groups_HV.shape
        left = self.heads_left(site, method)
        others: dict[str, Any] = {"held_out": held_out, "splits": splits}

        def with_dims(of: _Heads) -> TracedReduced:
            each = width // len(of.groups_HV)
            if site.rows is not None:
                return _mix_values(site, of, method, each)
            return super(TracedValuesKind, self).reduced(
                site, moments, method, width, cached=of.chosen(method, each), **others
            )

        if heads == left == site.parts and site.rows is None:
            return super().reduced(site, moments, method, width, cached=cached, **others)
        full = _Heads(
            groups_HV=site.groups_HV,
            rows_HV=site.rows_HV,
            read=moments[0],
            own=_head_stats(site, moments),
            held_out=None if held_out is None else _head_stats(site, held_out),
            splits=splits and (_head_stats(site, splits[0]), _head_stats(site, splits[1])),
        )
        if left == heads:
            return with_dims(full)
        kept_M = kept_groups(full.own, method, heads, left)
        recovery, report = recover_heads(site.name, heads, full.own, method, kept_M, full.held_out, full.splits)
        fewer = full.fewer(kept_M, recovery)
        new = fewer.reduced(recovery, []) if width == left * dense else with_dims(fewer)
        return replace(new, reports=[report, *new.reports], beside=groups_of_heads(site, kept_M))

    def elimination(self, site: TracedValues, moments: Reads, method: Method) -> Elimination | None:
        return None if site.rows is not None else super().elimination(site, moments, method)

    def errors(
        self, site: TracedValues, moments: Reads, method: Method, cached: Elimination | None
    ) -> tuple[float, ...]:
        if site.rows is None:
            return super().errors(site, moments, method, cached)
        own = _head_stats(site, moments)
        lost_H = values.lowrank_spectrum(own.z_mean_C, own.z_second_CC, own.weight_OC, len(site.groups_HV))
        return tuple(float(lost_H[:, width // len(lost_H)].sum()) for width in self.offers(site, method))


def _square_width(site: TracedValues) -> int:
    """Return the width that square heads follow: the queries', or the values' own."""
    return site.queries or site.groups_HV.shape[1]


def _width_beside(site: TracedValues, size: int) -> int:
    """Return the width of all heads for queries of this size; full width if the queries keep theirs."""
    heads, dense = site.groups_HV.shape
    return heads * (dense if size == _square_width(site) else min(size, dense))


def groups_of_heads(site: Site, kept_M: Tensor) -> dict[str, Index]:
    """Return by name the groups of the attention's other sites that belong to these heads."""
    assert isinstance(site, TracedValues), site.name
    others = site.with_heads()
    assert not isinstance(others, str), (site.name, others)
    return {name: np.flatnonzero(np.isin(head_G, kept_M.cpu().numpy())) for name, head_G in others.items()}


def _head_stats(site: TracedValues, reads: Reads) -> HeadOutputs:
    (read,) = reads
    order_C = columns(site.groups_HV.flatten(), read.columns).to(read.weight_OU.device)
    return HeadOutputs(
        z_mean_C=read.stats.mean_U[order_C],
        z_second_CC=read.stats.second_UU[order_C[:, None], order_C],
        weight_OC=read.weight_OU[:, order_C],
        bias_O=read.bias_O,
    )


def _mix_values(site: TracedValues, heads: _Heads, method: Method, each: int) -> TracedReduced:
    """Return the site with its values mixed to `each` dimensions per head."""
    own, (count, dense) = heads.own, heads.groups_HV.shape
    recovery, ridge = recover_values(own, method, count, each, heads.splits)
    elsewhere = None if heads.held_out is None else heads.held_out.judged(recovery.as_dense_OC, recovery.bias_O)
    widths = dense, dense * method.attention_kept, each
    report = site_report(site.name, "v", widths, recovery, energy=own.energy, held_out=elsewhere, ridge=ridge)
    if each == dense:
        return TracedReduced(reports=[report], kept_K=heads.kept_K(each))
    if method.rotates:  # the same outputs, from channels with more even ranges
        weight_OK, v_map_HRV = rotate_weight(recovery.weight_OK, count), rotate_maps(recovery.v_map_HRV)
        recovery = replace(recovery, weight_OK=weight_OK, v_map_HRV=v_map_HRV)
    of_both = {"rows_HD": heads.rows_HV.to(recovery.v_map_HRV.device), "map_HRD": recovery.v_map_HRV}
    assert site.rows is not None, site.name
    return heads.reduced(recovery, [report], mapped=map_layer(site.program, site.rows, of_both))
