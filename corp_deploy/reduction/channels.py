"""From the moments and the method to the two layers of one MLP. Takes tensors, knows no model.

Legend: F channels, I inputs of the first layer, O outputs of the second, K kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.moments import ChannelMoments
from corp_deploy.algebra import channels
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.obs import Elimination, obs
from corp_deploy.algebra.quadratic import output_error, variance

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


def elimination(moments: ChannelMoments, layers: ChannelLayers, method: Method) -> Elimination:
    """The whole order of backward elimination at a site; one serves every width."""
    return obs(moments.covariance_FF, layers.second_OF, ridge_rel=method.ridge_rel)


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


def output_energy(moments: ChannelMoments, layers: ChannelLayers) -> float:
    """Variance of the dense output, the scale that errors are shares of: tr(W C W')."""
    return variance(layers.second_OF, moments.covariance_FF)


def _as_dense(recovery: ChannelRecovery, kept_K: Tensor, layers: ChannelLayers) -> Tensor:
    return torch.zeros_like(layers.second_OF).index_copy_(1, kept_K, recovery.weight_OK)


def _error(recovery: ChannelRecovery, kept_K: Tensor, layers: ChannelLayers, moments: ChannelMoments) -> float:
    change_OF = layers.second_OF - _as_dense(recovery, kept_K, layers)
    bias_change_O = -recovery.bias_O if layers.second_bias_O is None else layers.second_bias_O - recovery.bias_O
    return output_error(moments.mean_F, moments.second_FF, change_OF, bias_change_O)
