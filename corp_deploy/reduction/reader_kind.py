"""The kinds of sites that are reduced by the statistics of the layers that read them: channels, values, streams.

Legend: C groups, K kept, P parts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.quadratic import explained
from corp_deploy.spec.widths import aligned_width, aligned_widths, finer_step, narrow_step, stepped_width
from corp_deploy.traced.models.sites import Site, TracedChannels
from corp_deploy.traced.programs.folding import is_mean_weight

from .change import Change, TracedReduced
from .choice import eliminate_groups, rank_groups, repair_error, repair_layer, repair_mean, swap_groups
from .heads import ridge_by_halves
from .method import Method
from .reader_stats import ReaderStats, stats_of_readers, subtract_half, without_squeezes
from .report import HeldOut, SiteReport

OfSite = TypeVar("OfSite", bound=Site)
Reads = tuple[ReaderStats, ...]
Part = Literal["channels", "convolutions", "values", "streams"]
_LEAST_SQUARES = {"channels": "affine", "values": "affine", "convolutions": "im2col", "streams": "im2col"}
"""The repair, by part, whose ridge is chosen by halves of the images; other repairs stay as published."""


class TracedKind(Generic[OfSite]):
    """A Kind for one part of models: each part has its own sparsity, alignment, selection and repair in a method."""

    eliminates: ClassVar[bool] = True

    def __init__(self, part: Part) -> None:
        self.part = part

    def _choices(self, method: Method) -> tuple[float | None, int, str, str]:
        """Return the method's sparsity, alignment, selection and repair for this part."""
        if self.part == "convolutions":
            return method.conv_sparsity, method.align_conv, method.conv_selection, method.conv_recovery
        if self.part == "streams":
            return method.residual_sparsity, method.align_conv, method.conv_selection, method.conv_recovery
        if self.part == "channels":
            return method.mlp_sparsity, method.align_hidden, method.mlp_selection, method.mlp_recovery
        return method.attention_sparsity, method.align_head, "obs", "affine"

    def _align(self, site: OfSite, method: Method) -> int:
        align = self._choices(method)[1]
        if method.aligned:
            return align
        if self.part == "channels":
            align = narrow_step(site.width // site.parts, align)
        return max(align, site.multiple)

    def moments_at(self, site: OfSite, moments: Moments, device: torch.device) -> Reads:
        return stats_of_readers(site, moments, device)

    def rest_of(self, own: Reads, half: Reads) -> Reads:
        return tuple(subtract_half(each, part) for each, part in zip(own, half, strict=True))

    def sparsity(self, method: Method) -> float | None:
        return self._choices(method)[0]

    def uniform(self, site: OfSite, method: Method) -> int | None:
        sparsity, align = self._choices(method)[0], self._align(site, method)
        if sparsity is None or self.refusal(site, method):
            return None
        if self.part in ("convolutions", "streams"):
            return stepped_width(site.width, 1.0 - sparsity, finer_step(site.width, site.parts, align))
        return site.parts * aligned_width(site.width // site.parts, 1.0 - sparsity, align)

    def widths(self, site: OfSite, method: Method) -> tuple[int, ...]:
        align = self._align(site, method)
        if self.part == "convolutions":
            step = finer_step(site.width, site.parts, align)
            return (*range(step, site.width, step), site.width)
        return tuple(site.parts * each for each in aligned_widths(site.width // site.parts, align))

    def offers(self, site: OfSite, method: Method) -> tuple[int, ...]:
        stays = self.part == "streams" or self.refusal(site, method)
        return (site.width,) if stays else self._with_none(site, method)

    def _with_none(self, site: OfSite, method: Method) -> tuple[int, ...]:
        """Return the site's widths, with 0 in front if a constant may replace the site."""
        return (0,) * (method.empties and site.whole_removal is not None) + self.widths(site, method)

    def refusal(self, site: OfSite, method: Method) -> str:
        _, _, selection, recovery = self._choices(method)
        if selection == "fold":
            assert isinstance(site, TracedChannels), site.name
            units = site.units()
            return units if isinstance(units, str) else ""
        return "this preset's method has no form for convolutions" if recovery == "keep" else ""

    def note(self, site: OfSite, method: Method, width: int | None) -> str | None:
        asked, step, dense = self._choices(method)[1], self._align(site, method), site.width // site.parts
        if step >= asked or width is None or self.part != "channels":
            return None
        return (
            f"{site.name}: as it has {dense} channels, its width is a multiple of {step}, not of {asked}; see --align"
        )

    def chosen(
        self, site: OfSite, moments: Reads, method: Method, width: int, cached: Elimination | None = None
    ) -> Tensor | None:
        return self._choice(site, moments, method, width, cached)

    def _choice(self, site: OfSite, moments: Reads, method: Method, width: int, cached: Elimination | None) -> Tensor:
        selection, part_C = self._choices(method)[2], _parts(site, moments)
        if width in (0, site.width):
            return torch.arange(width, device=moments[0].weight_OU.device)
        if selection != "obs":
            return rank_groups(moments, selection, site.writing_GX(), part_C, width)
        kept_K = (cached or eliminate_groups(moments, part_C, ridge_rel=method.ridge_rel)).kept(width)
        swaps = method.mlp_swaps and self.part == "channels" and part_C is None
        return swap_groups(moments, kept_K, ridge_rel=method.ridge_rel) if swaps else kept_K

    def reduced(
        self,
        site: OfSite,
        moments: Reads,
        method: Method,
        width: int,
        *,
        cached: Elimination | Tensor | None = None,
        held_out: Reads | None = None,
        splits: tuple[Reads, Reads] | None = None,
    ) -> TracedReduced:
        kept_K = cached if isinstance(cached, Tensor) else self._choice(site, moments, method, width, cached)
        recovery = self._choices(method)[3] if width else "affine"
        chooses = width and recovery == _LEAST_SQUARES[self.part]
        strength, ridge = ridge_by_halves(
            (without_squeezes(splits[0]), without_squeezes(splits[1])) if splits is not None and chooses else None,
            method.ridge_rel,
            lambda of, strength: tuple(map(_changer(recovery, kept_K, strength), of)),
            lambda changes, half: _judged(changes, kept_K, half),
        )
        changes = tuple(map(_changer(recovery, kept_K, strength), without_squeezes(moments)))
        others = None if held_out is None else _judged(changes, kept_K, without_squeezes(held_out))
        report = replace(self.report(site, method, changes, len(kept_K), others), ridge_fit=ridge)
        squeezes = [read for read in moments if read.reading.is_squeeze]
        means = tuple(read for read in squeezes if is_mean_weight(read.reading.weight))
        changes += tuple(Change(read=read, recovery=repair_mean(read, kept_K)) for read in means)
        gated = tuple(read for read in squeezes if not is_mean_weight(read.reading.weight))
        changes += tuple(map(_changer("none" if recovery == "none" else "affine", kept_K, method.ridge_rel), gated))
        return TracedReduced(reports=[report], kept_K=kept_K, changes=changes if width < site.width else ())

    def report(
        self, site: OfSite, method: Method, changes: tuple[Change, ...], width: int, judged: HeldOut | None
    ) -> SiteReport:
        """Build one report on all layers that read the site: errors and energies add up."""
        every = [change.recovery for change in changes]
        before, after = sum(each.residual_uncompensated for each in every), sum(each.residual for each in every)
        lost = sum((1.0 - each.r2) * each.residual_uncompensated for each in every)
        return SiteReport(
            site=site.name,
            part="mlp" if self.part == "channels" else self.part,
            width_dense=site.width,
            width_asked=site.width * (1.0 - (self.sparsity(method) or 0.0)),
            width=width,
            energy=sum(change.read.energy for change in changes),
            error_uncompensated=before,
            error=after,
            r2=explained(lost, before),
            condition=max(each.condition for each in every),
            ridge=max(each.ridge for each in every),
            held_out=judged,
        )

    def elimination(self, site: OfSite, moments: Reads, method: Method) -> Elimination | None:
        return eliminate_groups(moments, _parts(site, moments), ridge_rel=method.ridge_rel)

    def errors(self, site: OfSite, moments: Reads, method: Method, cached: Elimination | None) -> tuple[float, ...]:
        order = cached or eliminate_groups(moments, _parts(site, moments), ridge_rel=method.ridge_rel)
        return tuple(map(order.error_at, self.offers(site, method)))


def _parts(site: Site, reads: Reads) -> Tensor | None:
    part_G = site.groups.part_G
    return None if part_G is None else torch.from_numpy(part_G).to(reads[0].weight_OU.device)


def _changer(recovery: str, kept_K: Tensor, ridge_rel: float) -> Callable[[ReaderStats], Change]:
    return partial(repair_layer, recovery=recovery, kept_K=kept_K, ridge_rel=ridge_rel)


def _judged(changes: tuple[Change, ...], kept_K: Tensor, others: Reads) -> HeldOut:
    pairs = list(zip(changes, others, strict=True))
    return HeldOut(
        energy=sum(other.energy for _, other in pairs),
        error=sum(repair_error(change.recovery, kept_K, other) for change, other in pairs),
    )
