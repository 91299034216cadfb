"""From the moments and the method to the channels that stay between two convolutions, and to the one that reads them.
Takes tensors, knows no model.

Legend: G groups of the reading convolution, C channels of a group, T places of its kernel, U = C T columns of a patch,
O outputs, P of a group, F channels of all groups, K kept, N groups of which each keeps as many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.patch_moments import PatchMoments
from corp_deploy.algebra import scores
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.patch_elimination import eliminate_channels, elimination_of_units, interleaved
from corp_deploy.algebra.patches import RECOVERIES, PatchStatistics, columns
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from

from .chosen import Chosen
from .method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A dense convolution that reads channels, in float64: weight_GPU and bias_O, and the rows [F,X] that write each
    channel; `groups`: of which each keeps as many channels, a multiple of G; `unit`: neighbouring channels that stay or
    go together, 1 where there are groups.
    """

    weight_GPU: Tensor
    bias_O: Tensor
    writing_FX: Tensor
    groups: int
    unit: int = 1

    def __post_init__(self) -> None:
        assert self.unit == 1 or self.groups == 1, (self.unit, self.groups)

    @property
    def channels(self) -> int:
        return len(self.writing_FX)

    @property
    def bias_GP(self) -> Tensor:
        return self.bias_O.view(len(self.weight_GPU), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The channels that stay, as many of each group, ascending, and the reading convolution on them [G,P,K T].

    `recovery` has the sums over groups; `ridge`: how strong it was chosen, where halves of the images chose.
    """

    kept_K: Tensor
    weight_GPU: Tensor
    recovery: ChannelRecovery
    ridge: RidgeChoice | None = None


def _statistics(moments: PatchMoments) -> list[PatchStatistics]:
    """Of each group."""
    return [
        PatchStatistics(
            mean_U=moments.mean_GU[group],
            second_UU=moments.second_GUU[group],
            mean_C=moments.map_mean_GC[group],
            second_CC=moments.map_second_GCC[group],
            taps=moments.taps,
        )
        for group in range(len(moments.sum_GU))
    ]


def elimination(moments: PatchMoments, reading: Reading, method: Method) -> Elimination:
    """The whole order of backward elimination, as many channels of each group, or a unit, at a time; one serves every
    width.
    """
    covariance_GUU, groups = moments.covariance_GUU, len(reading.weight_GPU)
    if reading.unit > 1:
        unit_of_C = torch.arange(reading.channels, device=covariance_GUU.device) // reading.unit
        return elimination_of_units(
            covariance_GUU[0], reading.weight_GPU[0], moments.taps, unit_of_C, ridge_rel=method.ridge_rel
        )
    each = reading.groups // groups
    width = reading.channels // groups
    group_of_C = torch.arange(width, device=covariance_GUU.device) // (width // each) if each > 1 else None
    return interleaved(
        [
            eliminate_channels(
                covariance_UU, weight_PU, moments.taps, ridge_rel=method.ridge_rel, group_of_C=group_of_C
            )
            for covariance_UU, weight_PU in zip(covariance_GUU, reading.weight_GPU, strict=True)
        ]
    )


def _scores(moments: PatchMoments, reading: Reading, method: Method) -> Tensor:
    """Of every channel [F], higher ones stay."""
    taps, second_FT = moments.taps, moments.second_GUU.diagonal(dim1=1, dim2=2).flatten()
    weight_OX = reading.weight_GPU.transpose(0, 1).flatten(1)  # whose columns are those of all groups
    match method.conv_selection:
        case "producer-l1":
            return scores.producer_l1(reading.writing_FX)
        case "producer-l2":
            return scores.producer_l2(reading.writing_FX)
        case "active":
            return moments.active_share_GC.flatten()
        case "variance":
            return moments.map_covariance_GCC.diagonal(dim1=1, dim2=2).flatten()
        case "energy":
            return scores.energy_patches(second_FT, taps)
        case "magnitude":
            return scores.magnitude_patches(weight_OX, taps)
        case "combined":
            return scores.combined_patches(second_FT, weight_OX, taps)
        case "wanda":
            return scores.wanda_patches(second_FT, weight_OX, taps)
        case "obs":
            raise AssertionError("an elimination has no scores")


def kept_channels(
    moments: PatchMoments, reading: Reading, method: Method, width: int, known: Elimination | Chosen | None = None
) -> Tensor:
    """Those that the chosen selection keeps, ascending, as many of each group, whole units. `known`, an elimination or
    the choice itself, is not made again.
    """
    if isinstance(known, Chosen):
        return known.kept_K
    assert width % (reading.groups * reading.unit) == 0, (width, reading.groups, reading.unit)
    if width == reading.channels:
        return torch.arange(width, device=reading.bias_O.device)
    if method.conv_selection == "obs":
        return (known or elimination(moments, reading, method)).kept(width)
    if reading.unit > 1:
        score_B = _scores(moments, reading, method).view(-1, reading.unit).sum(dim=1)
        return columns(scores.kept_from_scores(score_B, width // reading.unit), reading.unit)
    score_NC = _scores(moments, reading, method).view(reading.groups, -1)
    kept_NK = scores.kept_from_scores(score_NC, width // reading.groups)
    first_N1 = torch.arange(reading.groups, device=kept_NK.device)[:, None] * score_NC.shape[1]
    return (kept_NK + first_N1).flatten()


def group_places(kept_K: Tensor, reading: Reading) -> Tensor:
    """Kept channels by their numbers within each group [G,K]."""
    groups = len(reading.weight_GPU)
    return kept_K.view(groups, -1) % (reading.channels // groups)


def recovered(moments: PatchMoments, reading: Reading, method: Method, kept_K: Tensor, ridge_rel: float) -> Kept:
    """The reading convolution on these channels, group by group, by a ridge of this strength."""
    kept_GK = group_places(kept_K, reading)
    recover = RECOVERIES[method.conv_recovery]
    parts = [
        recover(statistics, weight_PU, bias_P, kept, ridge_rel=ridge_rel)
        for statistics, weight_PU, bias_P, kept in zip(
            _statistics(moments), reading.weight_GPU, reading.bias_GP, kept_GK, strict=True
        )
    ]
    return Kept(kept_K=kept_K, weight_GPU=torch.stack([each.weight_OK for each in parts]), recovery=_together(parts))


def _together(parts: list[ChannelRecovery]) -> ChannelRecovery:
    """The groups of a convolution as one: errors added up, the worst condition, the largest ridge."""
    if len(parts) == 1:
        return parts[0]
    dropped = sum(each.residual_uncompensated for each in parts)
    unexplained = sum((1.0 - each.r2) * each.residual_uncompensated for each in parts)
    return ChannelRecovery(
        weight_OK=torch.cat([each.weight_OK for each in parts]),
        bias_O=torch.cat([each.bias_O for each in parts]),
        residual=sum(each.residual for each in parts),
        residual_uncompensated=dropped,
        r2=1.0 - unexplained / dropped if dropped > 0.0 else 1.0,
        condition=max(each.condition for each in parts),
        ridge=max(each.ridge for each in parts),
    )


def unchanged(reading: Reading) -> ChannelRecovery:
    """Where all channels stay."""
    return ChannelRecovery(
        weight_OK=reading.weight_GPU.flatten(0, 1),
        bias_O=reading.bias_O,
        residual=0.0,
        residual_uncompensated=0.0,
        r2=1.0,
        condition=1.0,
        ridge=0.0,
    )


def output_energy(moments: PatchMoments, reading: Reading) -> float:
    """Variance of the dense outputs, the scale that errors are shares of."""
    pairs = zip(reading.weight_GPU, moments.covariance_GUU, strict=True)
    return sum(variance(weight_PU, covariance_UU) for weight_PU, covariance_UU in pairs)


def error_of(kept: Kept, reading: Reading, moments: PatchMoments) -> float:
    """E||y - y'||^2 on any moments of what the dense convolution reads."""
    second_GUU = moments.second_GUU
    return sum(
        output_error(moments.mean_GU[group], second_GUU[group], weight_PU, bias_P)
        for group, (weight_PU, bias_P) in enumerate(changes_of(kept, reading))
    )


def group_columns(kept: Kept, reading: Reading) -> list[Tensor]:
    """Those of a patch that stay, of each group."""
    taps = reading.weight_GPU.shape[-1] * len(reading.weight_GPU) // reading.channels
    return [columns(places_K, taps) for places_K in group_places(kept.kept_K, reading)]


def changes_of(kept: Kept, reading: Reading) -> list[tuple[Tensor, Tensor]]:
    """By how much weights [P,U] and biases [P] of each group differ from the dense ones, what is gone being 0."""
    bias_GP = kept.recovery.bias_O.view_as(reading.bias_GP) - reading.bias_GP
    change_GPU = -reading.weight_GPU
    for change_PU, columns_k, weight_Pk in zip(change_GPU, group_columns(kept, reading), kept.weight_GPU, strict=True):
        change_PU[:, columns_k] += weight_Pk
    return list(zip(change_GPU, bias_GP, strict=True))


def _share_lost(kept: Kept, reading: Reading, moments: PatchMoments) -> float:
    energy = output_energy(moments, reading)
    return error_of(kept, reading, moments) / energy if energy > 0.0 else 0.0


def channels_between(
    moments: PatchMoments,
    reading: Reading,
    method: Method,
    width: int,
    known: Elimination | Chosen | None = None,
    halves: tuple[PatchMoments, PatchMoments] | None = None,
) -> Kept:
    """Select and recover at one width. `halves` of the images choose the ridge toward the dense columns (`im2col`), and
    both together are then fitted by it; the other recoveries stay as published.
    """
    kept_K = kept_channels(moments, reading, method, width, known)
    if halves is None or method.conv_recovery != "im2col":
        return recovered(moments, reading, method, kept_K, method.ridge_rel)
    ridge = chosen_ridge(
        halves,
        ridges_from(method.ridge_rel),
        lambda half, strength: recovered(half, reading, method, kept_K, strength),
        lambda kept, half: _share_lost(kept, reading, half),
    )
    kept = recovered(moments, reading, method, kept_K, ridge.strength_whole)
    return Kept(kept_K=kept_K, weight_GPU=kept.weight_GPU, recovery=kept.recovery, ridge=ridge)
