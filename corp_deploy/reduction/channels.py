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
from corp_deploy.algebra.swap import swap

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
    """The dense layers of an MLP in float64: first [F,I] with bias or none, second [O,F] with bias or none."""

    first_FI: Tensor
    first_bias_F: Tensor | None
    second_OF: Tensor
    second_bias_O: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelsAtSite:
    """The new first layer and the recovered second one; `as_dense_OF` is the latter read on the dense channels.

    `kept_K`: the dense channels that stay.
    """

    first_KI: Tensor
    first_bias_K: Tensor | None
    recovery: ChannelRecovery
    as_dense_OF: Tensor
    kept_K: Tensor


def elimination(moments: ChannelMoments, layers: ChannelLayers, method: Method) -> Elimination:
    """The whole order of backward elimination at a site; one serves every width."""
    return obs(moments.covariance_FF, layers.second_OF, ridge_rel=method.ridge_rel)


def kept_channels(
    moments: ChannelMoments, layers: ChannelLayers, method: Method, width: int, known: Elimination | None = None
) -> Tensor:
    """The channels that the chosen selection keeps at one width, ascending. `known` spares a repeated elimination."""
    second_F, weight_OF = moments.second_FF.diagonal(), layers.second_OF
    match method.mlp_selection:
        case "obs":
            kept_K = (known or elimination(moments, layers, method)).kept(width)
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


def channels_at_site(
    moments: ChannelMoments, layers: ChannelLayers, method: Method, width: int, known: Elimination | None = None
) -> ChannelsAtSite:
    """Select and recover at one width."""
    kept_K = kept_channels(moments, layers, method, width, known)
    recovery = RECOVERIES[method.mlp_recovery](
        moments.mean_F, moments.second_FF, layers.second_OF, layers.second_bias_O, kept_K, ridge_rel=method.ridge_rel
    )
    bias_K = None if layers.first_bias_F is None else layers.first_bias_F[kept_K]
    as_dense_OF = torch.zeros_like(layers.second_OF).index_copy_(1, kept_K, recovery.weight_OK)
    return ChannelsAtSite(
        first_KI=layers.first_FI[kept_K],
        first_bias_K=bias_K,
        recovery=recovery,
        as_dense_OF=as_dense_OF,
        kept_K=kept_K,
    )


def output_energy(moments: ChannelMoments, layers: ChannelLayers) -> float:
    """Variance of the dense output, the scale that errors are shares of: tr(W C W')."""
    return variance(layers.second_OF, moments.covariance_FF)


def error_of(new: ChannelsAtSite, layers: ChannelLayers, moments: ChannelMoments) -> float:
    """E||y - y'||^2 of an MLP's new second layer on any moments of the dense one's inputs."""
    change_OF = layers.second_OF - new.as_dense_OF
    bias_change_O = -new.recovery.bias_O if layers.second_bias_O is None else layers.second_bias_O - new.recovery.bias_O
    return output_error(moments.mean_F, moments.second_FF, change_OF, bias_change_O)
