"""Channels between two convolutions where calibration summed the patches of some of them alone, for want of memory.

Least squares over patches then has no columns of the others: they are removed before anything is chosen, and what they
gave is fitted to those that have patches, by what calibration summed of the outputs.

Legend: G groups of a reading convolution, C channels of a group, R of them with patches, T places of its kernel,
U = R T columns, O outputs, P of a group, K kept.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calib.patch_moments import PatchMoments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.algebra.patches import columns
from corp_deploy.algebra.regression import Regression, refit_toward
from ground.errors import BadInput

from . import conv_channels
from .chosen import Chosen
from .conv_channels import Kept, Reading
from .method import Method


def _regressions(moments: PatchMoments) -> list[Regression]:
    """Of each group's outputs on the patches that there are."""
    assert moments.cross_GPU is not None, "there are patches of all channels"
    groups = len(moments.sum_GU)
    mean_GP = moments.target_mean_O.view(groups, -1)
    square_GP = (moments.target_square_O / moments.tokens).view(groups, -1)
    return [
        Regression(
            mean_K=moments.mean_GU[group],
            second_KK=moments.second_GUU[group],
            mean_O=mean_GP[group],
            cross_OK=moments.cross_GPU[group] / moments.tokens,
            target_square=float(square_GP[group].sum()),
        )
        for group in range(groups)
    ]


def _of_chosen(moments: PatchMoments, chosen_GR: Tensor) -> PatchMoments:
    """As of a convolution that reads no other channels."""
    group = torch.arange(len(chosen_GR), device=chosen_GR.device)[:, None]
    return replace(
        moments,
        map_sum_GC=moments.map_sum_GC[group, chosen_GR],
        map_gram_GCC=moments.map_gram_GCC[group[..., None], chosen_GR[:, :, None], chosen_GR[:, None]],
        active_GC=moments.active_GC[group, chosen_GR],
        channels_GR=None,
        cross_GPU=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Among:
    """The same choice among the channels that have patches: `chosen_F` are their numbers among all, `lost` is what the
    best convolution on all of them loses.
    """

    moments: PatchMoments
    reading: Reading
    chosen_GR: Tensor
    chosen_F: Tensor
    lost: float

    @classmethod
    def of(cls, moments: PatchMoments, reading: Reading, ridge_rel: float) -> "Among":
        """The dense columns refitted to the outputs, toward themselves."""
        chosen_GR = moments.channels_GR
        assert chosen_GR is not None, "there are patches of all channels"
        assert reading.groups == len(chosen_GR), (reading.groups, chosen_GR.shape)
        width = reading.channels // reading.groups
        pairs = zip(_regressions(moments), reading.weight_GPU, chosen_GR, strict=True)
        refits = [
            refit_toward(weight_PU[:, columns(chosen_R, moments.taps)], regression, strength=ridge_rel)
            for regression, weight_PU, chosen_R in pairs
        ]
        first_G1 = torch.arange(reading.groups, device=chosen_GR.device)[:, None] * width
        chosen_F = (chosen_GR + first_G1).flatten()
        own = replace(
            reading,
            weight_GPU=torch.stack([refit.weight_OK for refit in refits]),
            bias_O=torch.cat([refit.bias_O for refit in refits]),
            writing_FX=reading.writing_FX[chosen_F],
        )
        return cls(
            moments=_of_chosen(moments, chosen_GR),
            reading=own,
            chosen_GR=chosen_GR,
            chosen_F=chosen_F,
            lost=sum(refit.residual for refit in refits),
        )

    def order(self, method: Method, channels: int) -> Elimination:
        """All channels without patches first, each for an equal part of what they lose together."""
        own = conv_channels.elimination(self.moments, self.reading, method)
        is_other_F = torch.ones(channels, dtype=torch.bool, device=self.chosen_F.device)
        is_other_F[self.chosen_F] = False
        others = is_other_F.nonzero().squeeze(1)
        parts = torch.arange(1, len(others) + 1, device=others.device, dtype=torch.float64) / max(len(others), 1)
        return Elimination(
            order_F=torch.cat((others, self.chosen_F[own.order_F])),
            error_F=torch.cat((self.lost * parts, self.lost + own.error_F)),
            ridge=own.ridge,
        )

    def kept_channels(self, width: int, method: Method) -> Tensor:
        """Selected, by their numbers among all."""
        return self.chosen_F[conv_channels.kept_channels(self.moments, self.reading, method, width)]

    def at(self, kept_K: Tensor, method: Method, halves: tuple[PatchMoments, PatchMoments] | None) -> Kept:
        """Recovered on these channels, by their numbers among all."""
        by_half = (
            None if halves is None else (_of_chosen(halves[0], self.chosen_GR), _of_chosen(halves[1], self.chosen_GR))
        )
        within = Chosen(kept_K=torch.searchsorted(self.chosen_F, kept_K))
        kept = conv_channels.channels_between(self.moments, self.reading, method, len(kept_K), within, by_half)
        recovery = replace(
            kept.recovery,
            residual=kept.recovery.residual + self.lost,
            residual_uncompensated=kept.recovery.residual_uncompensated + self.lost,
        )
        return replace(kept, kept_K=kept_K, recovery=recovery)


def elimination(moments: PatchMoments, reading: Reading, method: Method) -> Elimination:
    """See conv_channels; channels without patches go first."""
    if moments.channels_GR is None:
        return conv_channels.elimination(moments, reading, method)
    return Among.of(moments, reading, method.ridge_rel).order(method, reading.channels)


def _refuse_unsummed(moments: PatchMoments, reading: Reading, method: Method, width: int) -> None:
    assert moments.channels_GR is not None, "there are patches of all channels"
    chosen, every = moments.channels_GR.numel(), reading.channels
    if method.conv_recovery != "im2col" or chosen < width < every:
        raise BadInput(
            f"the moments have patches of {chosen} of {every} channels (calibrate --patch-memory), of which preset "
            f"best can keep {chosen} at most, or all; got {width} by recovery {method.conv_recovery}; calibrate "
            "with more memory, or remove more there"
        )


def kept_channels(
    moments: PatchMoments, reading: Reading, method: Method, width: int, known: Elimination | None = None
) -> Tensor:
    """See conv_channels. Raises BadInput for more channels than have patches, and for a method that isn't least squares
    over patches.
    """
    if moments.channels_GR is None:
        return conv_channels.kept_channels(moments, reading, method, width, known)
    _refuse_unsummed(moments, reading, method, width)
    if width == reading.channels:
        return torch.arange(width, device=reading.bias_O.device)
    if known is not None and method.conv_selection == "obs":
        return known.kept(width)
    return Among.of(moments, reading, method.ridge_rel).kept_channels(width, method)


def channels_between(
    moments: PatchMoments,
    reading: Reading,
    method: Method,
    width: int,
    known: Elimination | Chosen | None = None,
    halves: tuple[PatchMoments, PatchMoments] | None = None,
) -> Kept:
    """See conv_channels. Raises BadInput as kept_channels does."""
    if moments.channels_GR is None:
        return conv_channels.channels_between(moments, reading, method, width, known, halves)
    _refuse_unsummed(moments, reading, method, width)
    if width == reading.channels:
        return _whole(reading)
    among = Among.of(moments, reading, method.ridge_rel)
    kept_K = known.kept_K if isinstance(known, Chosen) else among.kept_channels(width, method)
    return among.at(kept_K, method, halves)


def _whole(reading: Reading) -> Kept:
    """The dense convolution."""
    recovery = conv_channels.unchanged(reading)
    every_F = torch.arange(reading.channels, device=reading.bias_O.device)
    return Kept(kept_K=every_F, weight_GPU=reading.weight_GPU, recovery=recovery)


def output_energy(moments: PatchMoments, reading: Reading) -> float:
    """Variance of the dense outputs."""
    if moments.channels_GR is None:
        return conv_channels.output_energy(moments, reading)
    return float(moments.target_variance_O.sum())


def error_of(kept: Kept, reading: Reading, moments: PatchMoments) -> float:
    """E||y - y'||^2 on any moments of what the dense convolution reads."""
    if moments.channels_GR is None:
        return conv_channels.error_of(kept, reading, moments)
    if len(kept.kept_K) == reading.channels:
        return 0.0
    places_GK = conv_channels.group_places(kept.kept_K, reading)
    bias_GP, total = kept.recovery.bias_O.view_as(reading.bias_GP), 0.0
    for group, regression in enumerate(_regressions(moments)):
        within_K = torch.searchsorted(moments.channels_GR[group], places_GK[group])
        weight_PU = torch.zeros_like(regression.cross_OK)
        weight_PU[:, columns(within_K, moments.taps)] = kept.weight_GPU[group]
        total += regression.error(weight_PU, bias_GP[group])
    return total
