"""The kind of queries and keys of traced models: the algebra of heads on the rows that produce them.

Legend: H heads, T heads that share their keys, D dimensions of a head, P places of it (single dimensions, or rotary
planes) that are removed one by one, K of them kept, R dimensions kept, I inputs of the layers.
"""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from calib.combination import subtract_statistics
from calib.moments import HeadMoments, Moments, moments_on_device
from corp_deploy.algebra import queries_keys, scores
from corp_deploy.algebra.rotation import rotate_maps
from corp_deploy.spec.widths import aligned_width, aligned_widths
from corp_deploy.traced.models.pairs import Side, TracedPairs

from .change import Mapped, TracedReduced, map_layer
from .heads import qk_report, recover_qk
from .method import Method
from .reader_stats import missing_statistics


class TracedPairsKind:
    """Queries and keys, as a Kind."""

    eliminates: ClassVar[bool] = False

    def moments_at(self, site: TracedPairs, moments: Moments, device: torch.device) -> HeadMoments:
        statistics = moments.sites.get(site.name)
        if not isinstance(statistics, HeadMoments):
            raise missing_statistics(site.name)
        return moments_on_device(statistics, device)

    def rest_of(self, own: HeadMoments, half: HeadMoments) -> HeadMoments:
        return subtract_statistics(own, half)

    def sparsity(self, method: Method) -> float | None:
        return method.attention_sparsity

    def uniform(self, site: TracedPairs, method: Method) -> int | None:
        if not method.reduces_attention or self.refusal(site, method):
            return None
        return _group_count(site, aligned_width(site.dims, method.attention_kept, _step(site, method)))

    def widths(self, site: TracedPairs, method: Method) -> tuple[int, ...]:
        return tuple(_group_count(site, each) for each in aligned_widths(site.dims, _step(site, method)))

    def offers(self, site: TracedPairs, method: Method) -> tuple[int, ...]:
        stays = method.qk_recovery == "keep" or self.refusal(site, method)
        return (site.width,) if stays else self.widths(site, method)

    def refusal(self, site: TracedPairs, method: Method) -> str:
        """Return why a method that mixes dimensions can't mix those of this site; '' if it can, or for other methods.

        If it can't, uniform sparsities leave the site whole; a width given for the site removes dimensions unrepaired.
        """
        if not method.reduces_attention or method.qk_recovery == "select" or site.repair.mixing != "none":
            return ""
        return f"{site.repair.reason}, so that no dimension makes up for another"

    def note(self, site: TracedPairs, method: Method, width: int | None) -> str | None:
        reason = self.refusal(site, method)
        if not reason or width == site.width or not (width or method.attention_sparsity):
            return None
        return f"{site.name} {'keeps Q/K' if width is None else 'loses dimensions unrepaired'}: {reason}"

    def chosen(
        self, site: TracedPairs, moments: HeadMoments, method: Method, width: int, cached: object = None
    ) -> None:
        """Return None: `reduced` chooses the dimensions."""

    def reduced(
        self,
        site: TracedPairs,
        moments: HeadMoments,
        method: Method,
        width: int,
        *,
        cached: object = None,
        held_out: HeadMoments | None = None,
        splits: tuple[HeadMoments, HeadMoments] | None = None,
    ) -> TracedReduced:
        places, narrower, repair = width // len(site.groups_HP), width < site.width, site.repair
        dims, scores_HD = places * site.both.joined, _scores(site, moments, method)
        if repair.mixing == "none":
            # The places of the highest scores stay unchanged.
            method = replace(method, qk_recovery="select")
            kept_HK = scores.kept_from_scores(scores_HD.unflatten(1, (site.both.joined, -1)).sum(1), places)
            seconds = {"q_second_HDD": moments.q_second_HDD, "k_second_HDD": moments.k_centred_HDD}
            recovery = queries_keys.select(_dims_at(site, kept_HK), **seconds)
            report = qk_report(site.name, site.dims, recovery, moments, method, held_out)
            return TracedReduced(reports=[report], kept_K=_kept_groups(site, kept_HK), selected=narrower)
        in_planes, grouped = repair.mixing == "planes", site.both.shared
        recovery, ridge = recover_qk(
            site.name, moments, method, scores_HD, dims, splits, in_planes=in_planes, grouped=grouped
        )
        report = qk_report(site.name, site.dims, recovery, moments, method, held_out, ridge)
        maps = recovery.q_map_HRD, recovery.k_map_HRD
        if method.rotates and narrower and repair.mixing == "free":  # the same logits, with more even ranges
            maps = rotate_maps(maps[0]), rotate_maps(maps[1])
        if recovery.planes_HK is not None:
            kept_HK = recovery.planes_HK
        else:  # mixtures take the places of the largest scales, the first ones among equals
            least = [side.scale_HTD.abs().amin(1) for side in repair.sides]
            kept_HK = scores.kept_from_scores(torch.minimum(*least), places)
        kept_HR = _dims_at(site, kept_HK)
        sides = zip(repair.sides, maps, strict=True)
        mapped = tuple(each for side, map_HRD in sides for each in _map_side(site, side, map_HRD, kept_HR))
        return TracedReduced(reports=[report], kept_K=_kept_groups(site, kept_HK), mapped=mapped if narrower else ())

    def elimination(self, site: TracedPairs, moments: HeadMoments, method: Method) -> None:
        """Return None: there is no elimination."""

    def errors(self, site: TracedPairs, moments: HeadMoments, method: Method, cached: object) -> tuple[float, ...]:
        narrower = self.offers(site, method)[:-1]
        return *(self.reduced(site, moments, method, width).reports[0].error for width in narrower), 0.0


def _step(site: TracedPairs, method: Method) -> int:
    return math.lcm(method.align_head, site.both.joined)


def _group_count(site: TracedPairs, dims: int) -> int:
    """Return the number of groups of all heads with `dims` dimensions each."""
    return len(site.groups_HP) * (dims // site.both.joined)


def _kept_groups(site: TracedPairs, kept_HK: Tensor) -> Tensor:
    """Return the site's groups at the places `kept_HK` of each head, ascending."""
    return site.groups_HP.to(kept_HK.device).gather(1, kept_HK[:: site.both.shared]).flatten().sort().values


def _dims_at(site: TracedPairs, kept_HK: Tensor) -> Tensor:
    """Return the dimensions [H,R] at the places `kept_HK`: one each, or both of each plane."""
    first_J = site.groups_HP.shape[1] * torch.arange(site.both.joined, device=kept_HK.device)
    return (kept_HK[:, None] + first_J[:, None]).flatten(1)


def _scores(site: TracedPairs, moments: HeadMoments, method: Method) -> Tensor:
    if method.qk_selection == "energy":
        own_HD = scores.logit_energy(moments.energy_HD, moments.images)
    elif site.repair.sides:
        # [H,D,I], with heads that share their keys one behind the other.
        rows = (
            site.program.tensor(side.weight).detach().double().flatten(1)[side.rows_HTD].transpose(1, 2).flatten(2)
            for side in site.repair.sides
        )
        own_HD = scores.logit_magnitude(*rows).to(moments.energy_HD)
    else:
        own_HD = site.writing_GX().square().sum(1)[site.both.groups_HTD[:, 0]]
    return scores.shared_by_groups(own_HD, site.both.shared)


def _map_side(site: TracedPairs, side: Side, map_HRD: Tensor, kept_HR: Tensor) -> tuple[Mapped, Mapped]:
    rows_HTR, map_HTRD, added_HTR = side.on_rows(map_HRD, kept_HR.to(map_HRD.device))
    of_both = {
        "rows_HD": side.rows_HTD.flatten(0, 1).to(map_HRD.device),
        "map_HRD": map_HTRD.flatten(0, 1),
        "kept_HR": rows_HTR.flatten(0, 1),
    }
    return map_layer(site.program, side, of_both, added_HTR.flatten(0, 1))
