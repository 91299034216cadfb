"""Groups of a traced site as the layers that read them see them: which stay, and what those layers become.

A group is T columns of every such layer: the places of a kernel, or several inputs that go together.

Legend: C groups, T columns of each, U = C T, O outputs of a layer, X = O T, K kept, P parts that keep as many each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from calib.moments import ChannelMoments, Moments, on_device
from calib.patch_moments import PatchMoments
from corp_deploy.algebra import channels, patches, scores
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.coupled import eliminate_coupled
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.patch_elimination import eliminate_channels
from corp_deploy.algebra.patches import PatchStatistics, columns
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.swap import swap
from corp_deploy.families.traced_site import Reading, TracedSite
from ground.errors import BadInput

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
_SCORES: Mapping[str, Callable[["Read"], Tensor]] = MappingProxyType(
    {
        "energy": lambda read: scores.energy_patches(read.second_U, read.stats.taps),
        "magnitude": lambda read: scores.magnitude_patches(read.weight_OU, read.stats.taps),
        "combined": lambda read: scores.combined_patches(read.second_U, read.weight_OU, read.stats.taps),
        "wanda": lambda read: scores.wanda_patches(read.second_U, read.weight_OU, read.stats.taps),
        "variance": lambda read: scores.energy_patches(read.stats.covariance_UU.diagonal(), read.stats.taps),
        "active": lambda read: read.active_C,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A layer's own columns of a site, group by group, with their statistics, float64, of so many tokens. A batch norm
    right behind it is one with its weight and bias, but for what it adds.
    """

    reading: Reading
    tokens: float
    stats: PatchStatistics
    weight_OU: Tensor
    bias_O: Tensor
    active_C: Tensor

    @property
    def second_U(self) -> Tensor:
        return self.stats.second_UU.diagonal()

    @property
    def weight_XC(self) -> Tensor:
        """A row for each output and column of a group."""
        return self.weight_OU.view(len(self.weight_OU), -1, self.stats.taps).transpose(1, 2).flatten(0, 1)

    @property
    def energy(self) -> float:
        """Variance of what the layer makes of these columns."""
        return variance(self.weight_OU, self.stats.covariance_UU)

    @property
    def is_of_maps(self) -> bool:
        return self.reading.layer.weight.dim() > 2

    def undone(self, change_O: Tensor) -> Tensor:
        """A change [O,...] of weight or bias as it is ahead of that norm; none of an output that it makes 0."""
        gain_O = self.reading.gain_O
        if gain_O is None:
            return change_O
        gain = gain_O.to(change_O.device).view(-1, *[1] * (change_O.dim() - 1))
        return torch.where(gain == 0.0, 0.0, change_O / gain)

    def as_dense_OU(self, recovery: ChannelRecovery, kept_K: Tensor) -> Tensor:
        """A recovered layer on all groups, 0 on those that go."""
        kept_k = columns(kept_K, self.stats.taps)
        return torch.zeros_like(self.weight_OU).index_copy_(1, kept_k, recovery.weight_OK)


def reads_of(site: TracedSite, moments: Moments, where: torch.device) -> tuple[Read, ...]:
    """Of every layer that reads the site. Raises BadInput where the moments were taken without one."""
    reads = []
    for reading in site.readings:
        own = moments.sites.get(reading.name)
        if not isinstance(own, ChannelMoments | PatchMoments):
            raise BadInput(
                f"{site.name}: the moments hold no statistics of {reading.name}, which reads it; calibrate again "
                "without leaving it out"
            )
        reads.append(_read(reading, on_device(own, where)))
    return tuple(reads)


def _read(reading: Reading, moments: Moment) -> Read:
    """The columns of a group stand side by side."""
    index_C1 = torch.from_numpy(reading.columns_GM).to(reading.layer.weight.device)
    weight = reading.layer.weight.detach().double()
    weight_OCT = weight.reshape(*weight.shape[:2], -1)
    assert reading.layer.bias is not None, reading.name
    bias_O = reading.layer.bias.detach().double()
    if reading.gain_O is not None:
        gain_O = reading.gain_O.to(bias_O.device)
        weight_OCT, bias_O = weight_OCT * gain_O[:, None, None], bias_O * gain_O
    if isinstance(moments, ChannelMoments):
        index_U = index_C1.flatten()
        second_UU, mean_U, taps = (
            moments.second_FF[index_U[:, None], index_U],
            moments.mean_F[index_U],
            index_C1.shape[1],
        )
        # What groups of several elements are together is asked for where there is one element alone.
        mean_C, second_CC = mean_U[::taps], second_UU[::taps, ::taps]
        active_C = moments.active_share_F[index_U].view(-1, taps).mean(dim=1)
        weight_OU = weight_OCT[:, index_U].flatten(1)
    else:
        if moments.channels_GR is not None:
            raise BadInput(
                f"{reading.name}: of a traced model patches of all channels count; calibrate without a limit"
            )
        index_C = index_C1[:, 0]
        taps = moments.taps
        index_U = columns(index_C, taps)
        second_UU, mean_U = moments.second_GUU[0][index_U[:, None], index_U], moments.mean_GU[0][index_U]
        mean_C, second_CC = moments.map_mean_GC[0][index_C], moments.map_second_GCC[0][index_C[:, None], index_C]
        active_C = moments.active_share_GC[0][index_C]
        weight_OU = weight_OCT[:, index_C].flatten(1)
    stats = PatchStatistics(
        mean_U=mean_U,
        second_UU=_above_rounding(second_UU, mean_U),
        mean_C=mean_C,
        second_CC=_above_rounding(second_CC, mean_C),
        taps=taps,
    )
    tokens = float(moments.tokens)
    return Read(reading=reading, tokens=tokens, stats=stats, weight_OU=weight_OU, bias_O=bias_O, active_C=active_C)


def _above_rounding(second_UU: Tensor, mean_U: Tensor) -> Tensor:
    """Second moments of what is all but constant, whose covariance is the rounding of float32 products: with as much of
    it on the diagonal as makes it a covariance again.
    """
    second_U = second_UU.diagonal()
    rounding = _ROUNDING * torch.finfo(torch.float32).eps * float(second_U.sum())
    if rounding <= _ROUNDING_REL * float((second_U - mean_U.square()).mean()):
        return second_UU
    return second_UU + rounding * torch.eye(len(mean_U), dtype=second_UU.dtype, device=second_UU.device)


def rest_of(own: Read, half: Read) -> Read:
    """Without the images of `half`, some of its own."""
    tokens = own.tokens - half.tokens

    def left(whole: Tensor, part: Tensor) -> Tensor:
        return (whole * own.tokens - part * half.tokens) / tokens

    stats = PatchStatistics(
        mean_U=left(own.stats.mean_U, half.stats.mean_U),
        second_UU=left(own.stats.second_UU, half.stats.second_UU),
        mean_C=left(own.stats.mean_C, half.stats.mean_C),
        second_CC=left(own.stats.second_CC, half.stats.second_CC),
        taps=own.stats.taps,
    )
    return replace(own, tokens=tokens, stats=stats, active_C=left(own.active_C, half.active_C))


def of_places(reads: Sequence[Read]) -> tuple[Read, ...]:
    """Without squeezes, which follow what the others choose."""
    return tuple(read for read in reads if not read.reading.is_squeeze)


def _stacked(reads: Sequence[Read]) -> list[Read]:
    """Layers that read the very same tensor as one, whose rows are theirs in turn; squeezes have no say."""
    stacked: dict[tuple[str, int, bool], list[Read]] = {}
    for read in of_places(reads):
        stacked.setdefault((read.reading.source, read.stats.taps, read.is_of_maps), []).append(read)
    return [replace(each[0], weight_OU=torch.cat([read.weight_OU for read in each])) for each in stacked.values()]


def elimination(reads: Sequence[Read], part_C: Tensor | None, *, ridge_rel: float) -> Elimination:
    """The whole order of backward elimination over all layers, as many of each part at a time."""
    stacked = _stacked(reads)
    if len(stacked) == 1:
        (read,) = stacked
        return eliminate_channels(
            read.stats.covariance_UU, read.weight_OU, read.stats.taps, ridge_rel=ridge_rel, group_of_C=part_C
        )
    assert part_C is None, "parts of what several layers read"
    covariances = [each.stats.second_CC - torch.outer(each.stats.mean_C, each.stats.mean_C) for each in stacked]
    weights = [
        each.weight_OU.view(len(each.weight_OU), -1, each.stats.taps).transpose(1, 2).flatten(0, 1) for each in stacked
    ]
    return eliminate_coupled(covariances, weights, ridge_rel=ridge_rel)


def swapped(reads: Sequence[Read], kept_K: Tensor, *, ridge_rel: float) -> Tensor:
    """The kept groups after exchanges that lose less, where one layer reads one element of each."""
    stacked = _stacked(reads)
    if len(stacked) > 1 or stacked[0].stats.taps > 1:
        return kept_K
    return swap(stacked[0].stats.covariance_UU, stacked[0].weight_OU, kept_K, ridge_rel=ridge_rel).kept_K


def ranked(reads: Sequence[Read], selection: str, writing_CX: Tensor, part_C: Tensor | None, width: int) -> Tensor:
    """The groups of the highest scores, ascending, as many of each part; over several layers of the sum of shares."""
    if selection in ("producer-l1", "producer-l2"):
        score_C = (scores.producer_l1 if selection == "producer-l1" else scores.producer_l2)(writing_CX)
    else:
        by_layer = [_SCORES[selection](read) for read in _stacked(reads)]
        score_C = reduce(torch.add, [each / each.sum().clamp_min(1e-300) for each in by_layer])
    if part_C is None:
        return scores.kept_from_scores(score_C, width)
    parts = int(part_C.max()) + 1
    of_part_PC = part_C.argsort(stable=True).view(parts, -1)
    kept_PK = scores.kept_from_scores(score_C[of_part_PC], width // parts)
    return of_part_PC.gather(1, kept_PK).flatten().sort().values


def recovered(read: Read, recovery: str, kept_K: Tensor, *, ridge_rel: float) -> ChannelRecovery:
    """What one layer becomes on the groups that stay."""
    if read.is_of_maps:
        return _OF_MAPS[recovery](read.stats, read.weight_OU, read.bias_O, kept_K, ridge_rel=ridge_rel)
    stats, kept_k = read.stats, columns(kept_K, read.stats.taps)
    recover: Any = _OF_VECTORS[recovery]
    new: ChannelRecovery = recover(
        stats.mean_U, stats.second_UU, read.weight_OU, read.bias_O, kept_k, ridge_rel=ridge_rel
    )
    return new


def error_of(read: Read, recovery: ChannelRecovery, kept_K: Tensor, other: Read) -> float:
    """E||y - y'||^2 of a recovered layer on other statistics of what it read."""
    change_OU = read.weight_OU - read.as_dense_OU(recovery, kept_K)
    return output_error(other.stats.mean_U, other.stats.second_UU, change_OU, read.bias_O - recovery.bias_O)
