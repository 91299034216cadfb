"""Five closed forms for a convolution after some of its input channels are removed, and REPAIR's rescaling of outputs.

A convolution is a linear layer on patches, y = W u + b with W = conv.weight.flatten(1): a channel is T columns of u,
one for each position in the kernel. Zero padding makes u zero outside of the feature map, so that a constant channel
isn't constant in patches: mixing channels (GRAIL) stays exact at borders, adding a constant doesn't.

Every form is judged on the moments of patches. One group of a convolution at a time.

Legend: C channels, T taps (positions in the kernel), U = C T columns, channel by channel, O outputs, K kept, k = K T,
X = O T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import channels
from .channels import ChannelRecovery, judge_layer
from .quadratic import RidgeSolution

_STILL_VARIANCE_REL = 1e-12  # an output whose variance is below this share of its scale is a constant


def columns(kept_K: Tensor, taps: int) -> Tensor:
    """Return the indices of the columns of these channels, channel by channel, int64 [K T]."""
    return (kept_K[:, None] * taps + torch.arange(taps, device=kept_K.device)).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatistics:
    """Moments of the inputs of one group of a convolution, float64.

    mean_U, second_UU: E[u] and E[u u'] over patches, padding's zeros included; mean_C, second_CC: E[x] and E[x x'] over
    all positions of the feature map, without padding; taps: T.
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
        return self.second_UU - torch.outer(self.mean_U, self.mean_U)


_ON_COLUMNS = {"none": channels.none, "bias": channels.bias, "im2col": channels.affine}
_ON_MAP = {"gram": channels.gram, "affine": channels.affine}


def recover_convolution(
    form: str, stats: PatchStatistics, weight_OU: Tensor, bias_O: Tensor | None, kept_K: Tensor, *, ridge_rel: float
) -> ChannelRecovery:
    """Return the new convolution on the kept channels, weight_OK [O, K T].

    * `none`: the columns are dropped and nothing else;
    * `bias`: b' = b + W_P E[u_P] (FLAP, on patches): right on average over inside and borders;
    * `im2col`: least squares over patches with a bias, `channels.affine` on columns. Without a ridge no other
      convolution on these channels has less error;
    * `gram`: W'[o,s,t] = sum_h W[o,h,t] B[h,s], B = G_:K (G_KK + ridge I)^-1, G = E[x x'] on the feature map; the bias
      stays (GRAIL, 3.1). The kept channels go through it too, as published;
    * `affine`: CORP's eq. 9 on the map's channels, x_P ~ B x_K + c, carried over as it stands: b' = b + sum_t
      W_P[:, :, t] c. Wrong at zero-padded borders, where the dropped channels are 0 and c isn't; there it can lose to
      `gram`. Right where nothing is padded.

    ridge_rel is relative to the mean diagonal.
    """
    taps, kept_k = stats.taps, columns(kept_K, stats.taps)
    if form in _ON_COLUMNS:
        return _ON_COLUMNS[form](stats.mean_U, stats.second_UU, weight_OU, bias_O, kept_k, ridge_rel=ridge_rel)
    outputs = len(weight_OU)
    # [O, C T] -> [O T, C]: each tap as a linear layer of its own, and back.
    weight_XC = weight_OU.unflatten(1, (-1, taps)).transpose(1, 2).flatten(0, 1)
    at_taps = _ON_MAP[form](stats.mean_C, stats.second_CC, weight_XC, None, kept_K, ridge_rel=ridge_rel)
    old_O = weight_OU.new_zeros(outputs) if bias_O is None else bias_O
    return judge_layer(
        stats.mean_U,
        stats.second_UU,
        weight_OU,
        old_O,
        kept_k,
        at_taps.weight_OK.unflatten(0, (outputs, taps)).transpose(1, 2).flatten(1),
        old_O + at_taps.bias_O.view(outputs, taps).sum(dim=1),
        RidgeSolution(solution_OK=at_taps.weight_OK, condition=at_taps.condition, ridge=at_taps.ridge),
    )


def rescale_outputs(
    weight_OU: Tensor,
    bias_O: Tensor,
    own_mean_O: Tensor,
    own_variance_O: Tensor,
    mean_O: Tensor,
    variance_O: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias with which every output has `mean_O` and `variance_O` in place of its own.

    REPAIR (Jordan et al. 2022, arXiv 2211.08403), GRAIL's re-estimated BatchNorm, folded into the convolution: `mean_O`
    and `variance_O` are the dense outputs'. An output that doesn't vary keeps its weights; its bias gives it the mean.
    """
    is_still_O = own_variance_O <= _STILL_VARIANCE_REL * torch.maximum(own_mean_O.square(), variance_O)
    scale_O = torch.where(is_still_O, 1.0, (variance_O / own_variance_O.masked_fill(is_still_O, 1.0)).sqrt())
    return scale_O[:, None] * weight_OU, mean_O - scale_O * (own_mean_O - bias_O)
