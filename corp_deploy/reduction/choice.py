"""The choice of the groups of a traced site that stay, and the repair and error of the layers that read them.

Moments of large convolutions can have patches (im2col statistics) of some input channels only; the groups of the other
channels can't be kept unless all groups are.

Legend: as in reader_stats.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from corp_deploy.algebra import channels, patches, scores
from corp_deploy.algebra.block_obs import eliminate_blocks, eliminate_coupled
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination, interleave, others_first
from corp_deploy.algebra.patches import columns
from corp_deploy.algebra.quadratic import explained, mean_from_kept, output_error
from corp_deploy.algebra.regression import refit_toward
from corp_deploy.algebra.swap import swap
from ground.errors import BadInput

from .change import Change
from .reader_stats import ReaderStats, without_squeezes

_SCORES: Mapping[str, Callable[["ReaderStats"], Tensor]] = {
    "energy": lambda read: scores.energy(read.second_U, read.columns),
    "magnitude": lambda read: scores.magnitude(read.weight_OU, read.columns),
    "combined": lambda read: scores.combined(read.second_U, read.weight_OU, read.columns),
    "wanda": lambda read: scores.wanda(read.second_U, read.weight_OU, read.columns),
    "variance": lambda read: scores.energy(read.stats.covariance_UU.diagonal(), read.columns),
    "active": lambda read: read.active_C,
}


def _stack_layers(reads: Sequence[ReaderStats]) -> list[ReaderStats]:
    """Stack the weights of layers that read the very same tensor into one layer; leave out squeezes.

    Where a layer has an output metric, its rows are scaled to their effect on the model's output.
    """
    stacked: dict[Any, list[ReaderStats]] = {}
    for read in without_squeezes(reads):
        stacked.setdefault((read.input_key, (read.portion.number, read.portion.columns_CM.tobytes())), []).append(read)
    return [
        replace(each[0], weight_OU=torch.cat([read.weighed_OU for read in each]), metric_OO=None)
        for each in stacked.values()
    ]


def eliminate_groups(reads: Sequence[ReaderStats], part_C: Tensor | None, *, ridge_rel: float) -> Elimination:
    """Order all groups by backward elimination over all layers, in rounds that remove one group of each part.

    Groups whose channels have no patches are removed first.
    """
    stacked, groups = _stack_layers(reads), len(reads[0].reading.columns_GM)
    if any(read.target is not None for read in stacked):
        return _order_with_patches(stacked, part_C, ridge_rel)
    if len(stacked) == 1:
        (read,) = stacked
        return eliminate_blocks(
            read.stats.covariance_UU, read.weight_OU, read.columns, ridge_rel=ridge_rel, group_of_C=part_C
        )
    if len({read.input_key for read in stacked}) == 1 and sum(len(read.groups_C) for read in stacked) == groups:
        return _order_by_portions(stacked, part_C, ridge_rel)
    inputs = dict.fromkeys(read.input_key for read in stacked)
    sets = [_join_portions([read for read in stacked if read.input_key == key]) for key in inputs]
    covariances, weights, joined = zip(*sets, strict=True)
    return eliminate_coupled(covariances, weights, ridge_rel=ridge_rel, taps=joined, part_C=part_C)


def _order_with_patches(stacked: Sequence[ReaderStats], part_C: Tensor | None, ridge_rel: float) -> Elimination:
    """Order the groups that have patches, by their columns after a refit to the whole output; all others go first."""
    every = [(read, read.target) for read in stacked if read.target is not None]
    refits = [refit_toward(read.weight_OU, target, strength=ridge_rel) for read, target in every]
    among = [replace(read, weight_OU=refit.weight_OK) for (read, _), refit in zip(every, refits, strict=True)]
    order, groups = _order_by_portions(among, part_C, ridge_rel), len(stacked[0].reading.columns_GM)
    return others_first(order, groups, sum(refit.residual for refit in refits))


def _order_by_portions(stacked: Sequence[ReaderStats], part_C: Tensor | None, ridge_rel: float) -> Elimination:
    """Order the groups of a site of which each is read by exactly one group of a grouped convolution."""
    orders = []
    for read in stacked:
        own_C = None if part_C is None else torch.unique(part_C[read.groups_C], return_inverse=True)[1]
        own_C = None if own_C is None or int(own_C.max()) == 0 else own_C
        order = eliminate_blocks(
            read.stats.covariance_UU, read.weight_OU, read.columns, ridge_rel=ridge_rel, group_of_C=own_C
        )
        orders.append(order)
    together, groups_C = interleave(orders), torch.cat([read.groups_C for read in stacked])
    return replace(together, order_F=groups_C[together.order_F])


def _join_portions(portions: Sequence[ReaderStats]) -> tuple[Tensor, Tensor, int]:
    """Return covariance [F,F] and weights [X,F] of all inputs of a layer, and the number of inputs per group.

    The covariance is zero between the groups of a convolution.
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


def swap_groups(reads: Sequence[ReaderStats], kept_K: Tensor, *, ridge_rel: float) -> Tensor:
    """Return the kept groups after exchanges with removed ones that lower the loss.

    `kept_K` is returned unchanged if several layers read the groups or a group has several columns.
    """
    stacked = _stack_layers(reads)
    if len(stacked) > 1 or stacked[0].columns > 1:
        return kept_K
    return swap(stacked[0].stats.covariance_UU, stacked[0].weight_OU, kept_K, ridge_rel=ridge_rel)


def rank_groups(
    reads: Sequence[ReaderStats], selection: str, writing_CX: Tensor, part_C: Tensor | None, width: int
) -> Tensor:
    """Return the indices of the `width` groups of highest score, ascending, equally many of each part.

    If several layers read the groups, each layer's scores are divided by their sum and then added. Groups without
    patches come last.
    """
    if selection in ("producer-l1", "producer-l2"):
        score_C = scores.producer(writing_CX, 1 if selection == "producer-l1" else 2)
    else:
        by_layer: dict[tuple[str, int, bool], Tensor] = {}
        for read in _stack_layers(reads):
            so_far_C = by_layer.setdefault(read.input_key, writing_CX.new_zeros(len(writing_CX)))
            so_far_C.index_add_(0, read.groups_C, _SCORES[selection](read))
        score_C = reduce(torch.add, [each / each.sum().clamp_min(1e-300) for each in by_layer.values()])
    has_patches_C = torch.zeros_like(score_C, dtype=torch.bool)
    for read in without_squeezes(reads):
        has_patches_C[read.groups_C] = True
    score_C = score_C.masked_fill(~has_patches_C, -math.inf)
    if part_C is None:
        return scores.kept_from_scores(score_C, width)
    parts = int(part_C.max()) + 1
    of_part_PC = part_C.argsort(stable=True).view(parts, -1)
    kept_PK = scores.kept_from_scores(score_C[of_part_PC], width // parts)
    return of_part_PC.gather(1, kept_PK).flatten().sort().values


def repair_layer(read: ReaderStats, *, recovery: str, kept_K: Tensor, ridge_rel: float) -> Change:
    """Return the change that repairs one layer on the kept groups; raise BadInput if some of them have no patches."""
    if read.target is not None:
        return Change(read=read, recovery=_fit_with_patches(read, recovery, kept_K, ridge_rel))
    stats, kept_k, layer = read.stats, read.kept_k(kept_K), (read.weight_OU, read.bias_O)
    if read.is_of_maps:
        form = "affine" if recovery == "affine-v1" else recovery
        return Change(read=read, recovery=patches.recover_convolution(form, stats, *layer, kept_k, ridge_rel=ridge_rel))
    of_vectors: Any = "affine" if recovery == "im2col" else recovery
    new = channels.recover_channels(of_vectors, stats.mean_U, stats.second_UU, *layer, kept_k, ridge_rel=ridge_rel)
    return Change(read=read, recovery=new)


def missing_patches(chosen: int, every: int, width: int, recovery: str) -> BadInput:
    """Return the error that explains why this repair can't keep so many channels."""
    return BadInput(
        f"the moments have patches of {chosen} of {every} channels (calibrate --patch-memory), of which preset best "
        f"can keep {chosen} at most, or all; got {width} by recovery {recovery}; calibrate with more memory, or remove "
        "more there"
    )


def _fit_with_patches(read: ReaderStats, recovery: str, kept_K: Tensor, ridge_rel: float) -> ChannelRecovery:
    """Fit the kept columns, whose channels have patches, to the dense output, by a ridge toward the dense columns."""
    assert read.target is not None, read.reading.name
    kept_U, parts = columns(read.kept_k(kept_K), read.stats.taps), len(read.reading.portions)
    if read.keeps_all_groups(kept_K):
        return ChannelRecovery(weight_OK=read.weight_OU[:, kept_U], bias_O=read.bias_O)
    if recovery != "im2col" or len(kept_U) * parts != len(kept_K) * read.columns:
        raise missing_patches(len(read.groups_C) * parts, len(read.reading.columns_GM), len(kept_K), recovery)
    weight_OK, target = read.weight_OU[:, kept_U], read.target.of(kept_U)
    refit = refit_toward(weight_OK, target, strength=ridge_rel)
    return ChannelRecovery(
        weight_OK=refit.weight_OK,
        bias_O=refit.bias_O,
        residual=refit.residual,
        residual_uncompensated=target.error(weight_OK, read.bias_O),
        r2=explained(refit.residual, refit.residual_prior),
        condition=refit.condition,
        ridge=refit.ridge,
    )


def repair_mean(read: ReaderStats, kept_K: Tensor) -> ChannelRecovery:
    """Return the weight that predicts a mean over all groups, which is used as a divisor, from the kept groups."""
    weight_K = mean_from_kept(read.stats.second_UU, read.weight_OU[0], read.kept_k(kept_K))
    plain = repair_layer(read, recovery="none", kept_K=kept_K, ridge_rel=0.0).recovery
    return replace(plain, weight_OK=weight_K[None], bias_O=read.bias_O)


def repair_error(recovery: ChannelRecovery, kept_K: Tensor, other: ReaderStats) -> float:
    """Return E||y - y'||^2 of a repaired layer on the statistics `other`; raise BadInput if they lack its patches."""
    if other.target is not None and other.keeps_all_groups(kept_K):
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
