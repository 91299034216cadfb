"""What a convolution becomes when some of its input channels are gone: five closed forms, and REPAIR.

A convolution is a linear layer on patches, y = W u + b with W = conv.weight.flatten(1): a channel is T columns of u,
one for each place of the kernel. Zero padding makes u zero outside of the map, so that what is constant on the map
isn't constant in patches: a map of channels alone (GRAIL) stays exact there, a constant beside it doesn't.

Every form is judged on the moments of patches. One group of a convolution at a time.

Legend: C channels, T taps (places of the kernel), U = C T columns, channel by channel, O outputs, K kept, k = K T,
X = O T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from . import channels
from .channels import ChannelRecovery, judged
from .quadratic import RidgeSolution

_STILL_VARIANCE_REL = 1e-12  # an output whose variance is below this share of its scale is a constant


def columns(kept_K: Tensor, taps: int) -> Tensor:
    """The columns of these channels in their order, int64 [K T]."""
    return (kept_K[:, None] * taps + torch.arange(taps, device=kept_K.device)).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatistics:
    """Moments of what one group of a convolution reads, float64.

    mean_U, second_UU: E[u] and E[u u'] over patches, zeros of the padding among them; mean_C, second_CC: E[x] and
    E[x x'] over all places of the map itself; taps: T.
    """

    mean_U: Tensor
    second_UU: Tensor
    mean_C: Tensor
    second_CC: Tensor
    taps: int

    def __post_init__(self) -> None:
        width, channels = self.mean_U.numel(), self.mean_C.numel()
        assert width == channels * self.taps, (width, channels, self.taps)
        assert self.second_UU.shape == (width, width), tuple(self.second_UU.shape)
        assert self.second_CC.shape == (channels, channels), tuple(self.second_CC.shape)

    @property
    def covariance_UU(self) -> Tensor:
        """Of patches."""
        return self.second_UU - torch.outer(self.mean_U, self.mean_U)


class PatchRecovery(Protocol):
    """The new convolution on the kept channels, weight_OK [O, K T]; ridge_rel is relative to the mean diagonal."""

    def __call__(
        self, stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
    ) -> ChannelRecovery: ...


def none(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """Drop the columns and nothing else. `ridge_rel` has no part in it."""
    kept_k = columns(kept_K, stats.taps)
    return channels.none(stats.mean_U, stats.second_UU, weight_OU, bias_O, kept_k, ridge_rel=ridge_rel)


def bias(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """b' = b + W_P E[u_P] (FLAP, on patches): right on average over inside and borders. `ridge_rel` has no part."""
    kept_k = columns(kept_K, stats.taps)
    return channels.bias(stats.mean_U, stats.second_UU, weight_OU, bias_O, kept_k, ridge_rel=ridge_rel)


def im2col(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """Least squares over patches with a bias, a ridge toward the kept columns: W' = W_K + W_P C_PK (C_KK + ridge I)^-1.

    `channels.affine` on columns. Without a ridge no other convolution on these channels has less error.
    """
    kept_k = columns(kept_K, stats.taps)
    return channels.affine(stats.mean_U, stats.second_UU, weight_OU, bias_O, kept_k, ridge_rel=ridge_rel)


def _tap_by_tap(weight_OU: Tensor, taps: int) -> Tensor:
    """[O, C T] -> [O T, C]: each tap as a linear layer of its own."""
    outputs, width = weight_OU.shape
    return weight_OU.view(outputs, width // taps, taps).transpose(1, 2).reshape(outputs * taps, width // taps)


def _together(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, at_taps: ChannelRecovery
) -> ChannelRecovery:
    """The taps' layers [O T, K] as one convolution, their biases added up, judged on patches."""
    outputs, taps, kept = weight_OU.shape[0], stats.taps, kept_K.numel()
    old_O = weight_OU.new_zeros(outputs) if bias_O is None else bias_O
    return judged(
        stats.mean_U,
        stats.second_UU,
        weight_OU,
        old_O,
        columns(kept_K, taps),
        at_taps.weight_OK.view(outputs, taps, kept).transpose(1, 2).reshape(outputs, kept * taps),
        old_O + at_taps.bias_O.view(outputs, taps).sum(dim=1),
        RidgeSolution(solution_OK=at_taps.weight_OK, condition=at_taps.condition, ridge=at_taps.ridge),
    )


def gram(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """W'[o,s,t] = sum_h W[o,h,t] B[h,s], B = G_:K (G_KK + ridge I)^-1, G = E[x x'] on the map; no bias (GRAIL, 3.1).

    The kept channels go through it too, as published.
    """
    weight_XC = _tap_by_tap(weight_OU, stats.taps)
    at_taps = channels.gram(stats.mean_C, stats.second_CC, weight_XC, None, kept_K, ridge_rel=ridge_rel)
    return _together(stats, weight_OU, bias_O, kept_K, at_taps)


def affine(
    stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """CORP's eq. 9 on the map's channels, x_P ~ B x_K + c, carried over as it stands: b' = b + sum_t W_P[:, :, t] c.

    Wrong at zero-padded borders, where the dropped channels are 0 and c isn't; there it can lose to `gram`. Right where
    nothing is padded.
    """
    weight_XC = _tap_by_tap(weight_OU, stats.taps)
    at_taps = channels.affine(stats.mean_C, stats.second_CC, weight_XC, None, kept_K, ridge_rel=ridge_rel)
    return _together(stats, weight_OU, bias_O, kept_K, at_taps)


RECOVERIES: Mapping[str, PatchRecovery] = MappingProxyType(
    {"none": none, "bias": bias, "gram": gram, "affine": affine, "im2col": im2col}
)


def rescaled_outputs(
    weight_OU: Tensor,
    bias_O: Tensor,
    own_mean_O: Tensor,
    own_variance_O: Tensor,
    mean_O: Tensor,
    variance_O: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weight and bias with which every output has this mean and variance, by those that it has so far.

    REPAIR (Jordan et al. 2022, arXiv 2211.08403), GRAIL's re-estimated BatchNorm, folded into the convolution: the mean
    and variance given are the dense outputs'. An output that doesn't vary keeps its weights and meets the mean.
    """
    whole_O = torch.maximum(own_mean_O.square(), variance_O)
    scale_O = _scales(own_variance_O, variance_O, whole_O)
    return scale_O[:, None] * weight_OU, mean_O - scale_O * (own_mean_O - bias_O)


def _scales(own_O: Tensor, variance_O: Tensor, whole_O: Tensor) -> Tensor:
    """From variances to those given; 1 where there is next to nothing of the `whole` scale to scale."""
    still_O = own_O <= _STILL_VARIANCE_REL * whole_O
    return torch.where(still_O, 1.0, (variance_O / own_O.masked_fill(still_O, 1.0)).sqrt())
