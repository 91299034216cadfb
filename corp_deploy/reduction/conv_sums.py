"""What a closed loop sums at one convolution of a row: patches that it reads in the model as reduced so far, and what a
target has beyond what it gives for them.

Legend: B images of a piece, N tokens, C channels, O outputs, G groups of a convolution, P outputs of a group, U columns
of a patch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from calib.active import ACTIVE_EPS
from calib.combination import added
from calib.hooks import listening
from calib.moments import ChannelMoments, on_device
from calib.patch_moments import PatchMoments
from calib.patch_sums import PatchSums
from calib.products import kernel_for
from calib.sites import ChannelTaps, PatchTaps, Role
from calib.sums import ChannelSums
from corp_deploy.algebra.regression_sums import Gram, RegressionSums
from corp_deploy.families.conv_block import ConvRow
from corp_deploy.families.convolution import Convolution
from corp_deploy.families.maps import map_from_tokens
from corp_deploy.families.squeeze import SqueezeExcite
from corp_deploy.families.steps import Branch

from .branch_sums import Halves, StreamEnergy, refuse_nonfinite
from .streams import Pair, Streams

Target = Callable[[Pair], Tensor]
"""What a convolution should give, [B,O,H,W]."""


def row_of(branch: Branch) -> ConvRow:
    """The branch's layer."""
    assert isinstance(branch.layer, ConvRow), branch.name
    return branch.layer


def convolution_of(row: ConvRow, name: str) -> Convolution:
    """By its name in the row."""
    conv = row.get_submodule(name)
    assert isinstance(conv, Convolution), name
    return conv


class DenseOutputs:
    """A target: what the branch's own convolution of this name gives on the dense stream, with its energy so far."""

    def __init__(self, branch: Branch, name: str) -> None:
        self._branch, self._row = branch, row_of(branch).up_to(name)
        self._grid = convolution_of(self._row, name).grid
        self._energy = StreamEnergy()

    def __call__(self, pair: Pair) -> Tensor:
        given_BNO = self._branch.run(self._row, pair.dense)
        self._energy.add(given_BNO)
        return map_from_tokens(given_BNO, self._grid)

    @property
    def energy(self) -> float:
        """The variance of a token, over all pairs it was asked for."""
        return self._energy.variance()


class Lacking:
    """A target: what the reduced stream lacks of the dense one, which is behind the branch already."""

    def __init__(self, branch: Branch, name: str, energy: float) -> None:
        """Of the row's last convolution; `energy`: the dense stream's."""
        self._branch, self._grid = branch, convolution_of(row_of(branch), name).grid
        self.energy = energy

    def __call__(self, pair: Pair) -> Tensor:
        return map_from_tokens(pair.dense - self._branch.carried(pair.reduced), self._grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSums:
    """Moments of what a convolution reads, over the images of the fit and over those held out, a target's products
    among them where there is one; by their names, of the means that squeezes in front of it read.
    """

    patches: Halves[PatchMoments]
    means: Mapping[str, ChannelMoments]

    def whole(self, site: str) -> PatchMoments:
        """Over all images."""
        return added(site, self.patches.fit, self.patches.held_out)


def _every_channel(conv: Convolution) -> Tensor:
    return torch.arange(conv.in_channels // conv.groups).repeat(conv.groups, 1)


def _patch_sums(conv: Convolution, name: str, channels_GR: Tensor | None) -> PatchSums:
    taps = PatchTaps(name=name, output=conv, edges=conv.edges, channels_GR=channels_GR)
    sums = PatchSums(taps, eps=ACTIVE_EPS)
    sums.kernel = kernel_for(taps.summed_width)
    return sums


def _moments(sums: PatchSums, where: torch.device) -> PatchMoments:
    moments = on_device(sums.moments(), where)
    refuse_nonfinite(sums.site.name, torch.cat([moments.sum_GU.flatten(), moments.target_square_O]))
    return moments


def read_sums(
    branch: Branch,
    layer: ConvRow,
    name: str,
    streams: Streams,
    *,
    target: Target | None = None,
    squeezes: Sequence[str] = (),
    whole: bool = False,
) -> ReadSums:
    """At this convolution of a layer in the branch's place, on the reduced stream: products of patches, and of what the
    target has beyond what the convolution gives. `whole`: no images are held out, and both halves are all of them.
    """
    row, conv = layer.up_to(name), convolution_of(layer, name)
    channels_GR = None if target is None else _every_channel(conv)
    label = f"{branch.name}.{name}"
    fit = _patch_sums(conv, label, channels_GR)
    sums = Halves(fit=fit, held_out=fit if whole else _patch_sums(conv, label, channels_GR))
    taps: list[PatchTaps | ChannelTaps] = [fit.site]
    means: dict[str, ChannelSums] = {}
    for each in squeezes:
        squeeze = row.get_submodule(each)
        assert isinstance(squeeze, SqueezeExcite), each
        taps.append(ChannelTaps(name=each, output=squeeze.reduce))
        means[each] = ChannelSums(eps=ACTIVE_EPS)
    heard = sums.fit
    wanted_BOHW: Tensor | None = None

    def hear(of: str, role: Role, activation: Tensor) -> None:
        if of in means:
            means[of].add(role, activation)
        else:
            told = wanted_BOHW - activation if role == "y" and wanted_BOHW is not None else activation
            heard.add(role, told)

    with listening(taps, hear):
        for pair in streams:
            heard, wanted_BOHW = sums.of(pair), None if target is None else target(pair)
            branch.run(row, pair.reduced)
    fitted = _moments(fit, streams.device)
    held_out = fitted if whole else _moments(sums.held_out, streams.device)
    return ReadSums(
        patches=Halves(fit=fitted, held_out=held_out),
        means={each: on_device(own.moments(), streams.device) for each, own in means.items()},
    )


def regressions(moments: PatchMoments) -> list[RegressionSums]:
    """Of what is lacking on patches, for each group."""
    assert moments.cross_GPU is not None, moments.taps
    groups = len(moments.sum_GU)
    sums_GP, squares_GP = moments.target_sum_O.view(groups, -1), moments.target_square_O.view(groups, -1)
    return [
        RegressionSums(
            x=Gram(tokens=moments.tokens, sum_K=moments.sum_GU[group], upper_KK=moments.gram_GUU[group]),
            t_O=sums_GP[group],
            tx_OK=moments.cross_GPU[group],
            tt=squares_GP[group].sum(),
        )
        for group in range(groups)
    ]
