"""Statistics of a traced site's groups, as the layers that read them see them.

A group is M inputs of every such layer, each at T positions of its kernel. A grouped convolution counts as several
layers, called portions, each with the inputs of one of its groups.

Legend: C groups, M inputs of each, F = C M, T places, U = F T columns, O outputs of a layer, X = O T, K groups kept,
k inputs kept, P parts that keep equally many each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calib.combination import add_statistics
from calib.moments import ChannelMoments, Moments, moments_on_device
from calib.patch_moments import PatchMoments
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.patches import PatchStatistics, columns
from corp_deploy.algebra.quadratic import variance
from corp_deploy.algebra.regression import Regression
from corp_deploy.traced.models.sites import Portion, Site, SiteReader
from ground.errors import BadInput

Moment = ChannelMoments | PatchMoments
_ROUNDING, _ROUNDING_REL = 4.0, 0.25
"""The rounding of second moments, in float32 epsilons, and the share of the mean variance that it must exceed."""


@dataclass(frozen=True, kw_only=True)  # without slots: cached properties need a __dict__
class ReaderStats:
    """A layer's own columns of a site, group by group, with their statistics over `tokens` tokens, float64.

    The scale of a batch norm right behind the layer is multiplied into weight and bias; the constant that the norm adds
    is not. `target`: if the moments have patches of some channels only, the columns are those of these channels and
    `target` is the regression of the layer's whole output on them. `metric_OO`: the matrix M with which a change d of
    the layer's output changes the model's output by d' M d, if a plan computed it (see planning/curvature.py).
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
        """M, the number of the layer's inputs in a group."""
        return int(self.portion.columns_CM.shape[1])

    @property
    def columns(self) -> int:
        """The number of columns of a group, which stand side by side."""
        return self.stats.taps * self.joined

    @property
    def groups_C(self) -> Tensor:
        """The groups of the site that the layer reads, ascending."""
        return torch.from_numpy(self.portion.groups_C).to(self.weight_OU.device)

    @property
    def input_key(self) -> tuple[str, int, bool]:
        """The key that layers with the same input share."""
        return self.reading.source, self.stats.taps, self.is_of_maps

    def kept_k(self, kept_K: Tensor) -> Tensor:
        """Return the positions [k] of the kept groups' inputs among the layer's own inputs."""
        return columns(torch.isin(self.groups_C, kept_K).nonzero()[:, 0], self.joined)

    @cached_property
    def energy(self) -> float:
        """The variance of the output due to the layer's columns of the site; of the whole output with a `target`."""
        return self.target.spread if self.target is not None else variance(self.weight_OU, self.stats.covariance_UU)

    def keeps_all_groups(self, kept_K: Tensor) -> bool:
        return len(kept_K) == len(self.reading.columns_GM)

    @cached_property
    def weighed_OU(self) -> Tensor:
        """R W with R'R = M, the metric: squares of columns are effects on the model's output; W without a metric."""
        if self.metric_OO is None or self.target is not None:
            return self.weight_OU
        root_OO: Tensor = torch.linalg.cholesky(self.metric_OO).T
        return root_OO @ self.without_gain(self.weight_OU)

    @property
    def is_of_maps(self) -> bool:
        return self.reading.layer.weight.dim() > 2

    def without_gain(self, change_O: Tensor) -> Tensor:
        """Divide a change [O,...] of weight or bias by the batch norm's scale; 0 for outputs that it scales to 0."""
        if self.reading.gain_O is None:
            return change_O
        gain = self.reading.gain_O[self.portion.rows].to(change_O.device).view(-1, *[1] * (change_O.dim() - 1))
        return torch.where(gain == 0.0, 0.0, change_O / gain)

    def as_dense_OU(self, recovery: ChannelRecovery, kept_K: Tensor) -> Tensor:
        """Return a recovered layer's weight on all groups, 0 on removed ones."""
        kept_U = columns(self.kept_k(kept_K), self.stats.taps)
        return torch.zeros_like(self.weight_OU).index_copy_(1, kept_U, recovery.weight_OK)


def missing_statistics(site: str, of: str = "this site") -> BadInput:
    """Return the error for moments that were taken without statistics that a site needs."""
    return BadInput(f"{site}: the moments hold no statistics of {of}; calibrate again without leaving it out")


def stats_of_readers(site: Site, moments: Moments, where: torch.device) -> tuple[ReaderStats, ...]:
    """Return the statistics of every layer that reads the site, one for each group of a grouped convolution.

    The statistics of all calls of a layer are added.

    Raises:
        BadInput: the moments were taken without one of the layers.
    """
    first, moments_of = dict[str, SiteReader](), dict[str, Moment]()
    for reading in site.readings:
        own = moments.sites.get(reading.name)
        if not isinstance(own, ChannelMoments | PatchMoments):
            raise missing_statistics(site.name, f"{reading.name}, which reads it")
        before = moments_of.get(first.setdefault(reading.weight, reading).weight)
        moments_of[reading.weight] = own if before is None else add_statistics(reading.name, before, own)
    there = {weight: moments_on_device(own, where) for weight, own in moments_of.items()}
    metrics = moments.metrics
    return tuple(
        _portion_stats(each, part, there[weight], metrics.get(weight))
        for weight, each in first.items()
        for part in each.portions
    )


def _find_target(
    moments: PatchMoments, portion: Portion, places_F: Tensor, gain_P: Tensor, stats: PatchStatistics
) -> Regression:
    """Return the regression of a portion's output, scaled by `gain_P` of the norm behind it, on its patches.

    `places_F`: the positions of the portion's channels among those that have patches.
    """
    assert moments.cross_GPU is not None, "there are patches of all channels"
    index_U = columns(places_F, moments.taps)
    return Regression(
        mean_K=stats.mean_U,
        second_KK=stats.second_UU,
        mean_O=moments.target_mean_O[portion.rows] * gain_P,
        cross_OK=moments.cross_GPU[portion.number][:, index_U] / moments.tokens * gain_P[:, None],
        target_square=float((moments.target_square_O[portion.rows] / moments.tokens * gain_P.square()).sum()),
    )


def _portion_stats(reading: SiteReader, portion: Portion, moments: Moment, metric_OO: Tensor | None) -> ReaderStats:
    """Return the statistics of one portion of a layer, with the columns of a group side by side."""
    layer, where = reading.layer, reading.layer.weight.device
    if reading.is_biasless and isinstance(moments, ChannelMoments):
        moments = replace(moments, sum_F=torch.zeros_like(moments.sum_F))  # see RegressionSums.uncentred
    chosen_GR = moments.channels_GR if isinstance(moments, PatchMoments) else None
    if chosen_GR is not None:
        chosen_R = chosen_GR[portion.number].cpu().numpy()
        portion = portion.among(chosen_R)
        places_F = torch.from_numpy(np.searchsorted(chosen_R, portion.columns_CM.flatten())).to(where)
        index_F = torch.from_numpy(portion.columns_CM).flatten().to(where)
    else:
        index_F = places_F = torch.from_numpy(portion.columns_CM).flatten().to(where)
    weight = reading.gained_weight[portion.rows]
    assert layer.bias is not None, reading.name
    bias_O = layer.bias.detach()[portion.rows].double()
    gain_O = torch.ones_like(bias_O) if reading.gain_O is None else reading.gain_O.to(where)[portion.rows]
    stats, active_F = _statistics(moments, portion.number, index_F, places_F)
    return ReaderStats(
        reading=reading,
        portion=portion,
        tokens=float(moments.tokens),
        stats=stats,
        weight_OU=weight.reshape(*weight.shape[:2], -1)[:, index_F].flatten(1),
        bias_O=bias_O * gain_O,
        active_C=active_F.view(len(portion.groups_C), -1).mean(dim=1),
        target=None if chosen_GR is None else _find_target(moments, portion, places_F, gain_O, stats),  # type: ignore[arg-type]
        metric_OO=None if metric_OO is None else metric_OO[portion.rows][:, portion.rows].to(where),
    )


def _statistics(moments: Moment, number: int, index_F: Tensor, places_F: Tensor) -> tuple[PatchStatistics, Tensor]:
    """Return the moments of these channels of a portion, and the share of tokens at which each is active.

    `places_F`: the positions of the channels among those that have patches.
    """
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


def _above_rounding(second_UU: Tensor, mean_U: Tensor) -> Tensor:
    """Return second moments, their diagonal raised if their covariance is only the rounding of float32 products.

    Such inputs are almost constant; the shift is large enough to make it a covariance again.
    """
    second_U = second_UU.diagonal()
    rounding = _ROUNDING * torch.finfo(torch.float32).eps * float(second_U.sum())
    if rounding <= _ROUNDING_REL * float((second_U - mean_U.square()).mean()):
        return second_UU
    return second_UU + rounding * torch.eye(len(mean_U), dtype=second_UU.dtype, device=second_UU.device)


def subtract_half(own: ReaderStats, half: ReaderStats) -> ReaderStats:
    """Return the statistics of a reader's images without those of `half`, which are some of them."""
    tokens = own.tokens - half.tokens

    def left(full: Tensor, part: Tensor) -> Tensor:
        return (full * own.tokens - part * half.tokens) / tokens

    names = "mean_U", "second_UU", "mean_C", "second_CC"
    rest: dict[str, Any] = {name: left(getattr(own.stats, name), getattr(half.stats, name)) for name in names}
    stats = replace(own.stats, **rest)
    target = None
    if own.target is not None and half.target is not None:
        target = own.target.less(half.target, half.tokens / own.tokens)
    return replace(own, tokens=tokens, stats=stats, active_C=left(own.active_C, half.active_C), target=target)


def without_squeezes(reads: Sequence[ReaderStats]) -> tuple[ReaderStats, ...]:
    """Return all layers except squeezes, which read the channels' means over a feature map that others read in full.

    Squeezes have no part in the choice of groups.
    """
    return tuple(read for read in reads if not read.reading.is_squeeze)
