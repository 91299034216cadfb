"""From the moments and the method to the two layers of one MLP. Takes tensors, knows no model.

Legend: F channels, I inputs of the first layer, O outputs of the second, K kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.moments import ChannelMoments
from corp_deploy.algebra import channels, scores
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination, obs
from corp_deploy.algebra.quadratic import output_error, variance
from corp_deploy.algebra.ridges import RidgeChoice, chosen_ridge, ridges_from
from corp_deploy.algebra.swap import swap

from .chosen import Chosen
from .method import Method

RECOVERIES: Mapping[str, Callable[..., ChannelRecovery]] = {
    "none": channels.none,
    "bias": channels.bias,
    "gram": channels.gram,
    "affine": channels.affine,
    "affine-v1": channels.affine_v1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLayers:
    """The dense layers of an MLP in float64: first [F,I] with bias [F] or none, second [O,F] with bias or none. Of a
    gated MLP both rows of a channel stand side by side in the first: [F,2I] with bias [F,2].
    """

    first_FI: Tensor
    first_bias_F: Tensor | None
    second_OF: Tensor
    second_bias_O: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelsAtSite:
    """The new first layer and the recovered second one; `as_dense_OF` is the latter read on the dense channels.

    `kept_K`: the dense channels that stay; `ridge`: how strong it was chosen, where halves of the images chose.
    """

    first_KI: Tensor
    first_bias_K: Tensor | None
    recovery: ChannelRecovery
    as_dense_OF: Tensor
    kept_K: Tensor
    ridge: RidgeChoice | None = None


def elimination(moments: ChannelMoments, layers: ChannelLayers, method: Method) -> Elimination:
    """The whole order of backward elimination at a site; one serves every width."""
    return obs(moments.covariance_FF, layers.second_OF, ridge_rel=method.ridge_rel)


def kept_channels(
    moments: ChannelMoments,
    layers: ChannelLayers,
    method: Method,
    width: int,
    known: Elimination | Chosen | None = None,
) -> Tensor:
    """The channels that the chosen selection keeps at one width, ascending. `known`, an elimination or the choice
    itself, is not made again.
    """
    if isinstance(known, Chosen):
        return known.kept_K
    second_F, weight_OF = moments.second_FF.diagonal(), layers.second_OF
    match method.mlp_selection:
        case "obs":
            kept_K = (known or elimination(moments, layers, method)).kept(width)
            if not method.mlp_swaps:
                return kept_K
            return swap(moments.covariance_FF, weight_OF, kept_K, ridge_rel=method.ridge_rel).kept_K
        case "producer-l1":
            score_F = scores.producer_l1(layers.first_FI)
        case "producer-l2":
            score_F = scores.producer_l2(layers.first_FI)
        case "energy":
            score_F = scores.energy(second_F)
        case "magnitude":
            score_F = scores.magnitude(weight_OF)
        case "combined":
            score_F = scores.combined(second_F, weight_OF)
        case "active":
            score_F = scores.active(moments.active_share_F)
        case "variance":
            score_F = scores.variance(moments.covariance_FF.diagonal())
        case "wanda":
            score_F = scores.wanda(second_F, weight_OF)
        case "fold":
            raise AssertionError("folding keeps no channels, it merges them")
    return scores.kept_from_scores(score_F, width)


Halves = tuple[ChannelMoments, ChannelMoments]


def recovered(
    moments: ChannelMoments, layers: ChannelLayers, method: Method, kept_K: Tensor, ridge_rel: float
) -> ChannelRecovery:
    """The second layer on these channels, by a ridge of this strength."""
    return RECOVERIES[method.mlp_recovery](
        moments.mean_F, moments.second_FF, layers.second_OF, layers.second_bias_O, kept_K, ridge_rel=ridge_rel
    )


def share_lost(recovery: ChannelRecovery, kept_K: Tensor, layers: ChannelLayers, moments: ChannelMoments) -> float:
    """The error of a recovery on any moments, as a share of the variance of the dense output there."""
    energy = output_energy(moments, layers)
    return _error(recovery, kept_K, layers, moments) / energy if energy > 0.0 else 0.0


def ridge_by_halves(halves: Halves, layers: ChannelLayers, method: Method, kept_K: Tensor) -> RidgeChoice:
    """The strength, from the method's own upwards, whose fits to either half lose least on the other."""
    return chosen_ridge(
        halves,
        ridges_from(method.ridge_rel),
        lambda half, strength: recovered(half, layers, method, kept_K, strength),
        lambda recovery, half: share_lost(recovery, kept_K, layers, half),
    )


def channels_at_site(
    moments: ChannelMoments,
    layers: ChannelLayers,
    method: Method,
    width: int,
    known: Elimination | Chosen | None = None,
    halves: Halves | None = None,
) -> ChannelsAtSite:
    """Select and recover at one width. `halves` of the images choose the ridge toward the dense columns (`affine`), and
    both together are then fitted by it; the other recoveries stay as published.
    """
    kept_K = kept_channels(moments, layers, method, width, known)
    ridge = None
    if halves is not None and method.mlp_recovery == "affine":
        ridge = ridge_by_halves(halves, layers, method, kept_K)
    recovery = recovered(moments, layers, method, kept_K, method.ridge_rel if ridge is None else ridge.strength_whole)
    bias_K = None if layers.first_bias_F is None else layers.first_bias_F[kept_K]
    as_dense_OF = _as_dense(recovery, kept_K, layers)
    return ChannelsAtSite(
        first_KI=layers.first_FI[kept_K],
        first_bias_K=bias_K,
        recovery=recovery,
        as_dense_OF=as_dense_OF,
        kept_K=kept_K,
        ridge=ridge,
    )


def output_energy(moments: ChannelMoments, layers: ChannelLayers) -> float:
    """Variance of the dense output, the scale that errors are shares of: tr(W C W')."""
    return variance(layers.second_OF, moments.covariance_FF)


def _as_dense(recovery: ChannelRecovery, kept_K: Tensor, layers: ChannelLayers) -> Tensor:
    return torch.zeros_like(layers.second_OF).index_copy_(1, kept_K, recovery.weight_OK)


def _error(recovery: ChannelRecovery, kept_K: Tensor, layers: ChannelLayers, moments: ChannelMoments) -> float:
    change_OF = layers.second_OF - _as_dense(recovery, kept_K, layers)
    bias_change_O = -recovery.bias_O if layers.second_bias_O is None else layers.second_bias_O - recovery.bias_O
    return output_error(moments.mean_F, moments.second_FF, change_OF, bias_change_O)


def error_of(new: ChannelsAtSite, layers: ChannelLayers, moments: ChannelMoments) -> float:
    """E||y - y'||^2 of an MLP's new second layer on any moments of the dense one's inputs."""
    return _error(new.recovery, new.kept_K, layers, moments)
