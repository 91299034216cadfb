"""Convolutions whose patch statistics cover some channels only, to save memory: fitted to their own dense outputs.

Legend: O outputs, P of a group, U columns of the channels with patches, K of those that stay.
"""

from torch import Tensor

from calib.patch_moments import PatchMoments
from corp_deploy.algebra.channels import ChannelRecovery
from corp_deploy.algebra.patches import PatchStatistics, columns
from corp_deploy.algebra.regression import Regression, refit_toward
from corp_deploy.traced.models.sites import Portion
from ground.errors import BadInput


def target_of(
    moments: PatchMoments, portion: Portion, places_F: Tensor, gain_P: Tensor, stats: PatchStatistics
) -> Regression:
    """What a group of the layer gave, times what a norm behind it multiplies by, with channels at these places among
    those that have patches.
    """
    assert moments.cross_GPU is not None, "there are patches of all channels"
    index_U = columns(places_F, moments.taps)
    square_P = moments.target_square_O[portion.rows] / moments.tokens
    return Regression(
        mean_K=stats.mean_U,
        second_KK=stats.second_UU,
        mean_O=moments.target_mean_O[portion.rows] * gain_P,
        cross_OK=moments.cross_GPU[portion.number][:, index_U] / moments.tokens * gain_P[:, None],
        target_square=float((square_P * gain_P.square()).sum()),
    )


def without_patches(chosen: int, every: int, width: int, recovery: str) -> BadInput:
    """Why so many channels can't be kept by this repair."""
    return BadInput(
        f"the moments have patches of {chosen} of {every} channels (calibrate --patch-memory), of which preset best "
        f"can keep {chosen} at most, or all; got {width} by recovery {recovery}; calibrate with more memory, or remove "
        "more there"
    )


def fitted(target: Regression, weight_OK: Tensor, bias_O: Tensor, *, ridge_rel: float) -> ChannelRecovery:
    """The dense columns of what stays fitted to what the layer gave, toward themselves."""
    refit = refit_toward(weight_OK, target, strength=ridge_rel)
    return ChannelRecovery(
        weight_OK=refit.weight_OK,
        bias_O=refit.bias_O,
        residual=refit.residual,
        residual_uncompensated=target.error(weight_OK, bias_O),
        r2=1.0 - refit.residual / refit.residual_prior if refit.residual_prior > 0.0 else 1.0,
        condition=refit.condition,
        ridge=refit.ridge,
    )
