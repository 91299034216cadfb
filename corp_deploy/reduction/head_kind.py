"""Head sites: which widths, what each loses, and the reduction, on moments and on the streams of a closed loop."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from calib.combination import without
from calib.moments import HeadMoments, Moments
from corp_deploy.algebra import planes, queries_keys, values
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.modules import with_modules
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import (
    EMPTY_HEADS,
    HeadWidths,
    aligned_width,
    aligned_widths,
    geometry_of_heads,
    head_widths,
    is_empty,
)
from ground.errors import BadInput

from .branch_sums import dense_advanced, head_moments, head_moments_in_halves, inputs_sums
from .chosen import HeadsChosen
from .folded_channels import given_by
from .folded_heads import folded_heads
from .head_modules import emptied_heads, reduced_heads
from .heads import Halves, output_energy
from .judged_folds import PADDED, See, judged_folds
from .kind import ErrorCurve, LinearReduced, Reduced
from .linear_loop import OnStreams, fitted_linear
from .logits import qk_scores
from .loop import Loop
from .method import Method
from .report import SiteReport
from .statistics import statistics_at
from .streams import Streams
from .uncentred import heads_uncentred
from .whole_heads import fewer_heads, heads_report, kept_heads


class HeadKind:
    """See Kind."""

    eliminates: ClassVar[bool] = False
    reads_every_token: ClassVar[bool] = True

    def moments_at(self, site: HeadSite, moments: Moments, device: torch.device) -> HeadMoments:
        own = statistics_at(site, moments, HeadMoments, device)
        return heads_uncentred(own) if site.biasless else own

    def rest_of(self, own: HeadMoments, half: HeadMoments) -> HeadMoments:
        return without(own, half)

    def sparsity(self, method: Method) -> float | None:
        return method.attention_sparsity or method.heads_sparsity

    def uniform(self, site: HeadSite, method: Method) -> HeadWidths | None:
        """Where Q/K must stay, only square heads and fewer heads ask for something else."""
        if is_empty(site.width):
            return None
        asked, heads = self._uniform_dims(site, method), site.grouped * method.heads_left(site.groups)
        if _whole(site, method) or method.heads_recovery == "keep" or heads == site.heads:
            return asked
        return replace(asked or site.width, heads=heads)

    def _uniform_dims(self, site: HeadSite, method: Method) -> HeadWidths | None:
        values_stay = site.keeps_v or method.geometry != "square"
        if not method.reduces_attention or (site.keeps_qk and values_stay):
            return None
        return _widths(site, method, aligned_width(site.size, method.attention_kept, _step(site, method)))

    def widths(self, site: HeadSite, method: Method) -> tuple[HeadWidths, ...]:
        if site.keeps_dims:
            return (site.width,)
        sizes = aligned_widths(site.size, _step(site, method))
        return tuple(_widths(site, method, size) for size in sizes)

    def offers(self, site: HeadSite, method: Method) -> tuple[HeadWidths, ...]:
        """Queries and keys by values, unless heads are square or one of them must stay; none where values may go."""
        if method.value_recovery == "keep":
            return self.widths(site, method)
        empty = (EMPTY_HEADS,) * method.empties
        if site.keeps_qk or site.keeps_v or method.geometry == "square":
            return empty + self.widths(site, method)
        qk, v = aligned_widths(site.qk, _step(site, method)), aligned_widths(site.v, method.align_head)
        return empty + tuple(HeadWidths(qk=one, v=other) for one, other in product(qk, v))

    def refusal(self, site: HeadSite, method: Method) -> str:
        if method.heads_sparsity and (reason := _whole(site, method)):
            return reason
        if not site.keeps_qk or not method.reduces_attention:
            return ""
        return site.reason if site.keeps_v else f"{site.reason}; --heads square reduces its values"

    def note(self, site: HeadSite, method: Method, width: HeadWidths | None) -> str | None:
        if method.heads_sparsity and (reason := _whole(site, method)):
            return f"{site.name} keeps its heads: {reason}"
        if site.keeps_dims:
            return f"{site.name} keeps Q/K and V: {site.reason}" if method.attention_sparsity else None
        if site.keeps_v and width is not None and method.attention_sparsity:
            return f"{site.name} keeps V: {site.reason}"
        if not site.keeps_qk or not (width is not None or (method.reduces_attention and method.attention_sparsity)):
            return None
        about_values = "its values stay too, --heads square reduces them"
        if width is not None:
            about_values = f"{width.v} of {site.v} value dimensions a head stay"
        return f"{site.name} keeps Q/K: {site.reason}; {about_values}"

    def chosen(
        self, site: HeadSite, moments: HeadMoments, method: Method, width: HeadWidths, known: None = None
    ) -> HeadsChosen | None:
        if width == EMPTY_HEADS:
            return None
        rows_XI = site.first.weight.detach().double()
        return HeadsChosen(
            kept_M=_kept_heads(site, moments, method, width),
            scores_HD=None if site.keeps_qk else qk_scores(moments, method, rows_XI, grouped=site.grouped),
        )

    def reduced(
        self,
        site: HeadSite,
        moments: HeadMoments,
        method: Method,
        width: HeadWidths,
        *,
        known: HeadsChosen | None = None,
        held_out: HeadMoments | None = None,
        halves: Halves | None = None,
    ) -> LinearReduced:
        if width == EMPTY_HEADS:
            return emptied_heads(site, moments, method, held_out)
        scores_HD = None if known is None else known.scores_HD
        if width.heads is None:
            return reduced_heads(site, moments, method, width, held_out, halves, scores_HD=scores_HD)
        kept_M = _kept_heads(site, moments, method, width) if known is None else known.kept_M
        fewer = fewer_heads(site, moments, method, kept_M, held_out, halves)
        if (width.qk, width.v) == (site.qk, site.v):
            return LinearReduced(modules={site.name: fewer.site.module}, last=fewer.site.last, reports=[fewer.report])
        narrower = HeadWidths(qk=width.qk, v=width.v)
        new = reduced_heads(
            fewer.site,
            fewer.moments,
            method,
            narrower,
            fewer.held_out,
            fewer.halves,
            scores_HD=None if scores_HD is None else scores_HD[kept_M],
        )
        return replace(new, reports=[fewer.report, *new.reports])

    def elimination(self, site: HeadSite, moments: HeadMoments, method: Method) -> None:
        """Dimensions are ranked by one look at the moments, at any width."""

    def curves(
        self, site: HeadSite, moments: HeadMoments, method: Method, known: Elimination | None
    ) -> list[ErrorCurve]:
        """Of Q/K where they may shrink, and of the values where they may; without values no query is asked."""
        offers = self.offers(site, method)
        if len(offers) == 1:
            return []
        curves = []
        if not site.keeps_qk:
            lost_HD = _logits_lost(site, moments, method)
            offered = [width.qk or site.qk for width in offers]
            alone = {size: HeadWidths(qk=size, v=site.v) for size in offered}
            curves.append(_curve(lost_HD, alone, offered))
        if any(width.v != site.v for width in offers):
            weight_OC = site.last.weight.detach().double()
            lost_HD = values.lowrank_spectrum(moments.z_mean_C, moments.z_second_CC, weight_OC, site.heads)
            alone = {width.v: HeadWidths(qk=site.qk, v=width.v) if width.v else EMPTY_HEADS for width in offers}
            curves.append(_curve(lost_HD, alone, [width.v for width in offers]))
        return curves

    def layer(self, site: HeadSite, layer: nn.Module, method: Method, width: HeadWidths) -> nn.Module:
        geometry = geometry_of_heads(width, method.geometry)
        module = site.empty(qk=width.qk, v=width.v, geometry=geometry, heads=width.heads, fused=False)
        return module.eval()

    def rebuilt(
        self, branch: Branch, site: HeadSite, streams: Streams, method: Method, width: HeadWidths
    ) -> LinearReduced:
        if method.folds_heads and width.heads is not None:
            return _folded(branch, site, streams, method, width.heads)
        system = method.needs_attention_system
        moments, halves = head_moments_in_halves(branch, site, streams, system=system)
        return self.reduced(site, moments, method, width, halves=halves)

    def fitted(
        self, step: Branch, site: HeadSite, streams: Streams, method: Method, width: HeadWidths, loop: Loop
    ) -> tuple[Reduced, list[SiteReport]]:
        return fitted_linear(self, step, site, streams, method, width, loop)

    def on_streams(
        self,
        branch: Branch,
        site: HeadSite,
        step: Branch,
        streams: Streams,
        method: Method,
        width: HeadWidths,
        *,
        refit: Sequence[float] | None = None,
    ) -> OnStreams:
        """Other queries and keys make another z, so the reduced layer is run once more, and is what is fitted."""
        new = self.rebuilt(branch, site, streams, method, width)
        energy = dense_advanced(step, streams)
        layer = with_modules(branch.layer, site.name, new.modules)
        return OnStreams(new=new, lacking=inputs_sums(branch, layer, new.last, streams), energy=energy)


def _whole(site: HeadSite, method: Method) -> str:
    """Why all heads stay, or nothing."""
    return site.keeps_heads_apart if method.folds_heads else site.keeps_heads


def _kept_heads(site: HeadSite, moments: HeadMoments, method: Method, width: HeadWidths) -> Tensor:
    """The heads that stay."""
    weight_OC = site.last.weight.detach().double()
    if width.heads is None:
        return torch.arange(site.heads, device=weight_OC.device)
    return kept_heads(weight_OC, moments, method, width.heads, grouped=site.grouped)


def _folded(branch: Branch, site: HeadSite, streams: Streams, method: Method, count: int) -> LinearReduced:
    """Merged heads, fitted and judged on the reduced stream."""
    moments = head_moments(branch, site, streams, system=False)
    folded = folded_heads(site, branch.layer, moments, method, count)
    given = given_by(folded)

    def show(sees: Mapping[str, See]) -> None:
        for pair in streams:
            if pair.present_BN is not None:
                raise BadInput(PADDED.format(site.name))
            entering_BNC = branch.entering(pair.reduced)
            sees[site.name](*given(entering_BNC, branch.layer(entering_BNC)), False)

    judged = judged_folds({site.name: folded}, method, show)[site.name]
    energy = output_energy(moments, site.last.weight.detach().double())
    report = heads_report(site.name, site.heads, method, count, judged.recovery, energy, None)
    modules = folded.modules(judged.recovery.weight_OK, judged.recovery.bias_O)
    return LinearReduced(modules={**modules}, last=folded.last(modules), reports=[report])


def _step(site: HeadSite, method: Method) -> int:
    """What the one number of a site is rounded to a multiple of; where Q/K stay it is that of values."""
    return method.align_head if site.keeps_qk else site.step(method.align_head)


def _logits_lost(site: HeadSite, moments: HeadMoments, method: Method) -> Tensor:
    """[H, D + 1]: by each head at each width of queries and keys."""
    if site.in_planes:
        gram_HXX = moments.plane_gram_HXX
        if gram_HXX is None:
            gram_HXX = planes.aggregated_loss(moments.q_second_HDD, moments.k_centred_HDD).gram_HXX
        return planes.spectrum(gram_HXX, ridge_rel=method.ridge_rel, grouped=site.grouped)
    return queries_keys.lowrank_spectrum(moments.q_second_HDD, moments.k_centred_HDD)


def _widths(site: HeadSite, method: Method, size: int) -> HeadWidths:
    return head_widths(size, site.width, method.geometry, keeps_qk=site.keeps_qk, keeps_v=site.keeps_v)


def _curve(lost_HD: Tensor, alone: Mapping[int, HeadWidths], offered: Sequence[int]) -> ErrorCurve:
    """Of one part: what all heads lose at each of its sizes."""
    sizes = sorted(alone)
    return ErrorCurve(
        errors=tuple(float(lost_HD[:, size].sum()) for size in sizes),
        alone=tuple(alone[size] for size in sizes),
        places=tuple(map(sizes.index, offered)),
    )
