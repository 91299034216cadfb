"""Groups of a traced site as the layers that read them see them: which stay, and what those layers become.

A group is M inputs of every such layer, each of them at T places of its kernel. A convolution in groups is as many
layers of fewer inputs.

Legend: C groups, M inputs of each, F = C M, T places, U = F T columns, O outputs of a layer, X = O T, K groups kept,
k inputs kept, P parts that keep as many each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calib.combination import added
from calib.moments import ChannelMoments, Moments, on_device
from calib.patch_moments import PatchMoments
from corp_deploy.algebra import channels, patches, scores
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.coupled import eliminate_coupled
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.patch_elimination import eliminate_channels, interleaved, others_first
from corp_deploy.algebra.patches import PatchStatistics, columns
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.regression import Regression, refit_toward
from corp_deploy.algebra.shares import mean_from_kept
from corp_deploy.algebra.swap import swap
from corp_deploy.traced.models.sites import Portion, Site, SiteReader
from ground.errors import BadInput

from .partial_patches import fitted, target_of, without_patches
from .statistics import lacking, statistics_before
from .uncentred import channels_uncentred

Moment = ChannelMoments | PatchMoments
_ROUNDING, _ROUNDING_REL = 4.0, 0.25
"""Of second moments, in units of float32's, and the share of the mean variance from which nothing else is known."""
_OF_VECTORS: Mapping[str, Callable[..., ChannelRecovery]] = MappingProxyType(
    {
        "none": channels.none,
        "bias": channels.bias,
        "gram": channels.gram,
        "affine": channels.affine,
        "affine-v1": channels.affine_v1,
        "im2col": channels.affine,
    }
)
_OF_MAPS: Mapping[str, Callable[..., ChannelRecovery]] = MappingProxyType(
    {**patches.RECOVERIES, "affine-v1": patches.affine}
)
_SCORES: Mapping[str, Callable[["ReaderStats"], Tensor]] = MappingProxyType(
    {
        "energy": lambda read: scores.energy_patches(read.second_U, read.columns),
        "magnitude": lambda read: scores.magnitude_patches(read.weight_OU, read.columns),
        "combined": lambda read: scores.combined_patches(read.second_U, read.weight_OU, read.columns),
        "wanda": lambda read: scores.wanda_patches(read.second_U, read.weight_OU, read.columns),
        "variance": lambda read: scores.energy_patches(read.stats.covariance_UU.diagonal(), read.columns),
        "active": lambda read: read.active_C,
    }
)


@dataclass(frozen=True, kw_only=True)  # without slots, so that its energy can be kept
class ReaderStats:
    """A layer's own columns of a site, group by group, with their statistics, float64, of so many tokens. A batch norm
    right behind it is one with its weight and bias, but for what it adds. `target`: what the layer gave, where patches
    were summed of some channels alone: its columns are theirs then. `metric_OO`: what a change d of the layer's output
    does to the model's, d' M d, where a plan has learned it.
    """

    reading: SiteReader
    portion: Portion
    tokens: float
    stats: PatchStatistics
    weight_OU: Tensor
    bias_O: Tensor
    active_C: Tensor
    target: Regression | None = None
    metric_OO: Tensor | None = None

    @property
    def second_U(self) -> Tensor:
        return self.stats.second_UU.diagonal()

    @property
    def joined(self) -> int:
        """M."""
        return int(self.portion.columns_CM.shape[1])

    @property
    def columns(self) -> int:
        """Of a group, side by side."""
        return self.stats.taps * self.joined

    @property
    def groups_C(self) -> Tensor:
        """Those of the site that it reads, ascending."""
        return torch.from_numpy(self.portion.groups_C).to(self.weight_OU.device)

    @property
    def sees(self) -> tuple[str, int, bool]:
        """What makes layers see the same inputs."""
        return self.reading.source, self.stats.taps, self.is_of_maps

    def kept_k(self, kept_K: Tensor) -> Tensor:
        """Its inputs of groups that stay."""
        return columns(torch.isin(self.groups_C, kept_K).nonzero()[:, 0], self.joined)

    @cached_property
    def energy(self) -> float:
        """Variance of what the layer makes of the site."""
        return self.target.spread if self.target is not None else variance(self.weight_OU, self.stats.covariance_UU)

    def has_all_patches(self, kept_K: Tensor) -> bool:
        """Whether all groups of the site stay."""
        return len(kept_K) == len(self.reading.columns_GM)

    @cached_property
    def weighed_OU(self) -> Tensor:
        """The weight in units of the model's output: its columns' squares are what a change of them does there."""
        if self.metric_OO is None or self.target is not None:
            return self.weight_OU
        root_OO: Tensor = torch.linalg.cholesky(self.metric_OO).T
        return root_OO @ self.undone(self.weight_OU)

    @property
    def is_of_maps(self) -> bool:
        return self.reading.layer.weight.dim() > 2

    def undone(self, change_O: Tensor) -> Tensor:
        """A change [O,...] of weight or bias as it is ahead of that norm; none of an output that it makes 0."""
        if self.reading.gain_O is None:
            return change_O
        gain = self.reading.gain_O[self.portion.rows].to(change_O.device).view(-1, *[1] * (change_O.dim() - 1))
        return torch.where(gain == 0.0, 0.0, change_O / gain)

    def as_dense_OU(self, recovery: ChannelRecovery, kept_K: Tensor) -> Tensor:
        """A recovered layer on all groups, 0 on those that go."""
        kept_U = columns(self.kept_k(kept_K), self.stats.taps)
        return torch.zeros_like(self.weight_OU).index_copy_(1, kept_U, recovery.weight_OK)


def reads_of(site: Site, moments: Moments, where: torch.device) -> tuple[ReaderStats, ...]:
    """Of every layer that reads the site, all its uses as one, each group of a convolution by itself. Raises BadInput
    where the moments were taken without one.
    """
    first, moments_of = dict[str, SiteReader](), dict[str, Moment]()
    for reading in site.readings:
        own = statistics_before(site.name, reading.name, moments)
        if not isinstance(own, ChannelMoments | PatchMoments):
            raise lacking(site.name, f"{reading.name}, which reads it")
        before = moments_of.get(first.setdefault(reading.weight, reading).weight)
        moments_of[reading.weight] = own if before is None else added(reading.name, before, own)
    there = {weight: on_device(own, where) for weight, own in moments_of.items()}
    metrics = moments.metrics
    return tuple(
        _read(each, part, there[weight], metrics.get(weight))
        for weight, each in first.items()
        for part in each.portions
    )


def _read(reading: SiteReader, portion: Portion, moments: Moment, metric_OO: Tensor | None) -> ReaderStats:
    """The columns of a group stand side by side."""
    layer, where = reading.layer, reading.layer.weight.device
    if reading.is_biasless and isinstance(moments, ChannelMoments):
        moments = channels_uncentred(moments)
    portion, places_F = _summed(portion, moments)
    index_F, places_F = torch.from_numpy(portion.columns_CM).flatten().to(where), places_F.to(where)
    weight = reading.gained_weight[portion.rows]
    assert layer.bias is not None, reading.name
    bias_O = layer.bias.detach()[portion.rows].double()
    gain_O = torch.ones_like(bias_O) if reading.gain_O is None else reading.gain_O.to(where)[portion.rows]
    stats, active_F = _statistics(moments, portion.number, index_F, places_F)
    is_of_some = isinstance(moments, PatchMoments) and moments.channels_GR is not None
    return ReaderStats(
        reading=reading,
        portion=portion,
        tokens=float(moments.tokens),
        stats=stats,
        weight_OU=weight.reshape(*weight.shape[:2], -1)[:, index_F].flatten(1),
        bias_O=bias_O * gain_O,
        active_C=active_F.view(len(portion.groups_C), -1).mean(dim=1),
        target=target_of(moments, portion, places_F, gain_O, stats) if is_of_some else None,  # type: ignore[arg-type]
        metric_OO=None if metric_OO is None else metric_OO[portion.rows][:, portion.rows].to(where),
    )


def _statistics(moments: Moment, number: int, index_F: Tensor, places_F: Tensor) -> tuple[PatchStatistics, Tensor]:
    """Of these channels of a group, and how often each is active; `places_F`: among those that have patches."""
    if isinstance(moments, ChannelMoments):
        second_UU, mean_U, taps = moments.second_FF[index_F[:, None], index_F], moments.mean_F[index_F], 1
        second_FF, mean_F, active_F = second_UU, mean_U, moments.active_share_F[index_F]
    else:
        index_U, taps = columns(places_F, moments.taps), moments.taps
        second_UU, mean_U = moments.second_GUU[number][index_U[:, None], index_U], moments.mean_GU[number][index_U]
        second_FF = moments.map_second_GCC[number][index_F[:, None], index_F]
        mean_F, active_F = moments.map_mean_GC[number][index_F], moments.active_share_GC[number][index_F]
    stats = PatchStatistics(
        mean_U=mean_U,
        second_UU=_above_rounding(second_UU, mean_U),
        mean_C=mean_F,
        second_CC=_above_rounding(second_FF, mean_F),
        taps=taps,
    )
    return stats, active_F


def _summed(portion: Portion, moments: Moment) -> tuple[Portion, Tensor]:
    """What it reads of the channels that have patches, and where those stand among them."""
    if isinstance(moments, ChannelMoments) or moments.channels_GR is None:
        return portion, torch.from_numpy(portion.columns_CM).flatten()
    chosen_R = moments.channels_GR[portion.number].cpu().numpy()
    left = portion.among(chosen_R)
    return left, torch.from_numpy(np.searchsorted(chosen_R, left.columns_CM.flatten()))


def _above_rounding(second_UU: Tensor, mean_U: Tensor) -> Tensor:
    """Second moments of what is all but constant, whose covariance is the rounding of float32 products: with as much of
    it on the diagonal as makes it a covariance again.
    """
    second_U = second_UU.diagonal()
    rounding = _ROUNDING * torch.finfo(torch.float32).eps * float(second_U.sum())
    if rounding <= _ROUNDING_REL * float((second_U - mean_U.square()).mean()):
        return second_UU
    return second_UU + rounding * torch.eye(len(mean_U), dtype=second_UU.dtype, device=second_UU.device)


def rest_of(own: ReaderStats, half: ReaderStats) -> ReaderStats:
    """Without the images of `half`, some of its own."""
    tokens = own.tokens - half.tokens

    def left(full: Tensor, part: Tensor) -> Tensor:
        return (full * own.tokens - part * half.tokens) / tokens

    stats = PatchStatistics(
        mean_U=left(own.stats.mean_U, half.stats.mean_U),
        second_UU=left(own.stats.second_UU, half.stats.second_UU),
        mean_C=left(own.stats.mean_C, half.stats.mean_C),
        second_CC=left(own.stats.second_CC, half.stats.second_CC),
        taps=own.stats.taps,
    )
    target = None
    if own.target is not None and half.target is not None:
        target = own.target.less(half.target, half.tokens / own.tokens)
    return replace(own, tokens=tokens, stats=stats, active_C=left(own.active_C, half.active_C), target=target)


def of_places(reads: Sequence[ReaderStats]) -> tuple[ReaderStats, ...]:
    """Without squeezes, which follow what the others choose."""
    return tuple(read for read in reads if not read.reading.is_squeeze)


def _stacked(reads: Sequence[ReaderStats]) -> list[ReaderStats]:
    """Layers that read the very same tensor as one, whose rows are theirs in turn; squeezes have no say. Rows are in
    units of the model's output where that is known.
    """
    stacked: dict[Any, list[ReaderStats]] = {}
    for read in of_places(reads):
        inputs = read.portion.number, read.portion.columns_CM.tobytes()
        stacked.setdefault((read.sees, inputs), []).append(read)
    return [
        replace(each[0], weight_OU=torch.cat([read.weighed_OU for read in each]), metric_OO=None)
        for each in stacked.values()
    ]


def elimination(reads: Sequence[ReaderStats], part_C: Tensor | None, *, ridge_rel: float) -> Elimination:
    """The whole order of backward elimination over all layers, as many of each part at a time. Groups without patches
    go first.
    """
    stacked, groups = _stacked(reads), len(reads[0].reading.columns_GM)
    if any(read.target is not None for read in stacked):
        return _among_chosen(stacked, part_C, ridge_rel)
    if len(stacked) == 1:
        (read,) = stacked
        return eliminate_channels(
            read.stats.covariance_UU, read.weight_OU, read.columns, ridge_rel=ridge_rel, group_of_C=part_C
        )
    if len({read.sees for read in stacked}) == 1 and sum(len(read.groups_C) for read in stacked) == groups:
        return _by_portions(stacked, part_C, ridge_rel)
    sets = [_as_one([read for read in stacked if read.sees == sees]) for sees in dict.fromkeys(r.sees for r in stacked)]
    covariances, weights, joined = zip(*sets, strict=True)
    return eliminate_coupled(covariances, weights, ridge_rel=ridge_rel, taps=joined, part_C=part_C)


def _among_chosen(stacked: Sequence[ReaderStats], part_C: Tensor | None, ridge_rel: float) -> Elimination:
    """Of columns refitted to all that the layer gave."""
    every = [(read, read.target) for read in stacked if read.target is not None]
    refits = [refit_toward(read.weight_OU, target, strength=ridge_rel) for read, target in every]
    among = [replace(read, weight_OU=refit.weight_OK) for (read, _), refit in zip(every, refits, strict=True)]
    order, groups = _by_portions(among, part_C, ridge_rel), len(stacked[0].reading.columns_GM)
    return others_first(order, groups, sum(refit.residual for refit in refits))


def _by_portions(stacked: Sequence[ReaderStats], part_C: Tensor | None, ridge_rel: float) -> Elimination:
    """Of a convolution in groups, each of which reads groups of the site that no other does."""
    orders = []
    for read in stacked:
        own_C = None if part_C is None else torch.unique(part_C[read.groups_C], return_inverse=True)[1]
        own_C = None if own_C is None or int(own_C.max()) == 0 else own_C
        order = eliminate_channels(
            read.stats.covariance_UU, read.weight_OU, read.columns, ridge_rel=ridge_rel, group_of_C=own_C
        )
        orders.append(order)
    together, groups_C = interleaved(orders), torch.cat([read.groups_C for read in stacked])
    return replace(together, order_F=groups_C[together.order_F])


def _as_one(portions: Sequence[ReaderStats]) -> tuple[Tensor, Tensor, int]:
    """Covariance [F,F] and weights [X,F] of all inputs of a layer, none between its groups, and how many inputs a group
    of the site has.
    """
    joined = portions[0].joined
    count = len(portions[0].reading.columns_GM) * joined
    covariance_FF, weights = portions[0].weight_OU.new_zeros(count, count), []
    for read in portions:
        at_F = columns(read.groups_C, joined)
        mean_C, second_CC = read.stats.mean_C, read.stats.second_CC
        covariance_FF[at_F[:, None], at_F] = second_CC - torch.outer(mean_C, mean_C)
        by_place = read.weight_OU.view(len(read.weight_OU), -1, read.stats.taps).transpose(1, 2).flatten(0, 1)
        weights.append(by_place.new_zeros(len(by_place), count).index_copy_(1, at_F, by_place))
    return covariance_FF, torch.cat(weights), joined


def swapped(reads: Sequence[ReaderStats], kept_K: Tensor, *, ridge_rel: float) -> Tensor:
    """The kept groups after exchanges that lose less, where one layer reads one element of each."""
    stacked = _stacked(reads)
    if len(stacked) > 1 or stacked[0].columns > 1:
        return kept_K
    return swap(stacked[0].stats.covariance_UU, stacked[0].weight_OU, kept_K, ridge_rel=ridge_rel).kept_K


def ranked(
    reads: Sequence[ReaderStats], selection: str, writing_CX: Tensor, part_C: Tensor | None, width: int
) -> Tensor:
    """The groups of the highest scores, ascending, as many of each part; over several layers of the sum of shares."""
    if selection in ("producer-l1", "producer-l2"):
        score_C = (scores.producer_l1 if selection == "producer-l1" else scores.producer_l2)(writing_CX)
    else:
        by_layer: dict[tuple[str, int, bool], Tensor] = {}
        for read in _stacked(reads):
            so_far_C = by_layer.setdefault(read.sees, writing_CX.new_zeros(len(writing_CX)))
            so_far_C.index_add_(0, read.groups_C, _SCORES[selection](read))
        score_C = reduce(torch.add, [each / each.sum().clamp_min(1e-300) for each in by_layer.values()])
    has_patches_C = torch.zeros_like(score_C, dtype=torch.bool)
    for read in of_places(reads):
        has_patches_C[read.groups_C] = True
    score_C = score_C.masked_fill(~has_patches_C, -math.inf)
    if part_C is None:
        return scores.kept_from_scores(score_C, width)
    parts = int(part_C.max()) + 1
    of_part_PC = part_C.argsort(stable=True).view(parts, -1)
    kept_PK = scores.kept_from_scores(score_C[of_part_PC], width // parts)
    return of_part_PC.gather(1, kept_PK).flatten().sort().values


def recovered(read: ReaderStats, recovery: str, kept_K: Tensor, *, ridge_rel: float) -> ChannelRecovery:
    """What one layer becomes on the groups that stay. Raises BadInput for those that have no patches."""
    if read.target is not None:
        return _fitted(read, recovery, kept_K, ridge_rel)
    stats, kept_k = read.stats, read.kept_k(kept_K)
    if read.is_of_maps:
        return _OF_MAPS[recovery](stats, read.weight_OU, read.bias_O, kept_k, ridge_rel=ridge_rel)
    recover: Any = _OF_VECTORS[recovery]
    new: ChannelRecovery = recover(
        stats.mean_U, stats.second_UU, read.weight_OU, read.bias_O, kept_k, ridge_rel=ridge_rel
    )
    return new


def _fitted(read: ReaderStats, recovery: str, kept_K: Tensor, ridge_rel: float) -> ChannelRecovery:
    """To what the layer gave."""
    assert read.target is not None, read.reading.name
    kept_U, parts = columns(read.kept_k(kept_K), read.stats.taps), len(read.reading.portions)
    if read.has_all_patches(kept_K):
        return channels.unchanged(read.weight_OU[:, kept_U], read.bias_O)
    if recovery != "im2col" or len(kept_U) * parts != len(kept_K) * read.columns:
        every = len(read.reading.columns_GM)
        raise without_patches(len(read.groups_C) * parts, every, len(kept_K), recovery)
    return fitted(read.target.of(kept_U), read.weight_OU[:, kept_U], read.bias_O, ridge_rel=ridge_rel)


def mean_of_kept(read: ReaderStats, kept_K: Tensor) -> ChannelRecovery:
    """Of a mean over all groups that they are divided by, told of those that stay alone."""
    kept_k = read.kept_k(kept_K)
    weight_K = mean_from_kept(read.stats.second_UU, read.weight_OU[0], kept_k)
    own = recovered(read, "none", kept_K, ridge_rel=0.0)
    return replace(own, weight_OK=weight_K[None], bias_O=read.bias_O)


def error_of(recovery: ChannelRecovery, kept_K: Tensor, other: ReaderStats) -> float:
    """E||y - y'||^2 of a recovered layer on other statistics of what it read. Raises BadInput where those have no
    patches of what is kept.
    """
    if other.target is not None and other.has_all_patches(kept_K):
        return 0.0
    if recovery.weight_OK.shape[1] != len(other.kept_k(kept_K)) * other.stats.taps:
        raise BadInput(
            f"{other.reading.name}: the moments that judge it have patches of other channels; calibrate both with the "
            "same --patch-memory"
        )
    weight_OU = other.as_dense_OU(recovery, kept_K)
    if other.target is not None:
        return other.target.error(weight_OU, recovery.bias_O)
    change_OU = other.weight_OU - weight_OU
    return output_error(other.stats.mean_U, other.stats.second_UU, change_OU, other.bias_O - recovery.bias_O)
