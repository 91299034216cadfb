"""Sums at a layer for a closed loop: moments of its input in the model as reduced so far, and its residual.

Legend: G groups of a convolution, K columns of a layer, O its outputs, X places (tokens, or positions of a map).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from calib.active import ACTIVE_EPS
from calib.collect import Options, SiteSums, build_sums
from calib.combination import add_statistics
from calib.moments import ChannelMoments, HeadMoments, SiteMoments, moments_on_device
from calib.patch_moments import PatchMoments
from calib.patch_sums import PatchSums
from calib.products import PassWeights, add_active_, kernel_for, pass_weights
from calib.sites import PatchTaps, Role, listening_to_sites
from corp_deploy.algebra.regression import Gram, RegressionSums
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.programs.readers import CalledLayer, Layer, layer_as_module

from .layer_targets import Target, TargetResidual, output_rows
from .stream_walk import Piece, Segment, Values
from .streams import StreamEnergy, refuse_nonfinite

SplitStatistics = list[SiteMoments]
"""A layer's statistics over the inputs of the fit, then over the held-out ones; a set without inputs has no entry."""


def combine_halves(name: str, halves: SplitStatistics) -> SiteMoments:
    """Return the moments over the inputs of the fit and the held-out ones together."""
    return halves[0] if len(halves) == 1 else add_statistics(name, *halves)


def _combine_masks(one_X: Tensor | None, other_X: Tensor | None) -> Tensor | None:
    """Multiply two masks of places, or two weights of places; None stands for all places and weight 1."""
    return other_X if one_X is None else one_X if other_X is None else one_X * other_X


def _rows_at(x_XK: Tensor, places_X: Tensor | None) -> Tensor:
    return (x_XK if places_X is None else x_XK[places_X]).unsqueeze(0)


class _LinearSums:
    """Sums of a linear layer; places on which no output of the model depends count in its moments, but not in fits."""

    def __init__(self, layer: nn.Linear) -> None:
        inputs, outputs = layer.in_features, layer.out_features
        self.sums = RegressionSums.empty(inputs=inputs, outputs=outputs, device=layer.weight.device)
        self.unread: Gram | None = None
        self.active_K = torch.zeros_like(self.sums.x.sum_K)

    def add(self, x: Tensor, lacking: TargetResidual | None, weights_BN: Tensor | None) -> None:
        x_XK = x.flatten(0, -2)
        is_of_tokens = weights_BN is not None and x.shape[:2] == weights_BN.shape and x.dim() == 3
        of_tokens_X = weights_BN.flatten() if weights_BN is not None and is_of_tokens else None
        there_X = None if of_tokens_X is None else of_tokens_X > 0.0
        weights_X = _combine_masks(of_tokens_X, None if lacking is None else lacking.weights)

        def counted(places_X: Tensor | None) -> Tensor | None:
            return None if weights_X is None else _rows_at(weights_X, places_X)

        if lacking is None:
            self.sums.x.add(_rows_at(x_XK, there_X), counted(there_X))
        else:
            there_X = _combine_masks(there_X, lacking.counts)
            fitted_X = _combine_masks(there_X, lacking.read)
            residual_XO = lacking.residual.flatten(0, -2)
            self.sums.add(_rows_at(x_XK, fitted_X), _rows_at(residual_XO, fitted_X), counted(fitted_X))
            if lacking.read is not None:
                self.unread = self.unread or Gram.empty(x_XK.shape[1], x.device)
                unread_X = _combine_masks(there_X, ~lacking.read)
                self.unread.add(_rows_at(x_XK, unread_X), counted(unread_X))
        add_active_(self.active_K, _rows_at(x_XK, there_X), ACTIVE_EPS, counted(there_X))

    @property
    def is_empty(self) -> bool:
        return not self.sums.x.tokens

    def moments(self) -> ChannelMoments:
        x = self.sums.x if self.unread is None else self.sums.x.with_those_of(self.unread)
        return ChannelMoments(tokens=x.tokens, eps=ACTIVE_EPS, sum_F=x.sum_K, gram_FF=x.gram_KK, active_F=self.active_K)

    def regressions(self) -> list[RegressionSums]:
        return [self.sums]


class _ConvolutionSums:
    """Sums of a convolution over all places of its input."""

    def __init__(self, layer: nn.Conv2d, name: str, *, is_fitted: bool) -> None:
        channels_GR = torch.arange(layer.in_channels // layer.groups).repeat(layer.groups, 1) if is_fitted else None
        taps = PatchTaps(name=name, output=layer, channels_GR=channels_GR)
        self.sums, self.where = PatchSums(taps, eps=ACTIVE_EPS), layer.weight.device
        self.sums.kernel = kernel_for(taps.summed_width)
        self.layer = layer

    def add(self, x: Tensor, lacking: TargetResidual | None, weights_BN: Tensor | None) -> None:
        self.sums.add("x", x)
        self.sums.add("y", self.layer(x) if lacking is None else lacking.residual)

    @property
    def is_empty(self) -> bool:
        return not self.sums.tokens

    def moments(self) -> PatchMoments:
        return replace(self._all(), channels_GR=None, cross_GPU=None)

    def regressions(self) -> list[RegressionSums]:
        """Return the sums of the residual on patches, for each group."""
        moments = self._all()
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

    def _all(self) -> PatchMoments:
        return moments_on_device(self.sums.moments(), self.where)


@dataclass(slots=True, kw_only=True)
class LayerSums:
    """Sums of one layer; `gain_O`: the factor of its output in the residual, None for 1."""

    fit: _LinearSums | _ConvolutionSums
    held_out: _LinearSums | _ConvolutionSums
    gain_O: Tensor | None = None
    energy: StreamEnergy = field(default_factory=StreamEnergy)
    weights: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, layer: Layer, name: str, *, is_fitted: bool) -> "LayerSums":
        fit, held_out = (
            _LinearSums(layer) if isinstance(layer, nn.Linear) else _ConvolutionSums(layer, name, is_fitted=is_fitted)
            for _ in range(2)
        )
        return cls(fit=fit, held_out=held_out)

    def add(
        self,
        layer: CalledLayer,
        x: Tensor,
        lacking: TargetResidual | None,
        weights_BN: Tensor | None,
        *,
        held_out: bool,
    ) -> None:
        (self.held_out if held_out else self.fit).add(x, lacking, weights_BN)
        if lacking is not None:
            self.gain_O = lacking.gain_O
            wanted_XO = output_rows(lacking.target, layer.node)
            counted = None
            if weights_BN is not None and weights_BN.numel() == len(wanted_XO):
                counted = _rows_at(weights_BN.reshape(-1, 1), lacking.read)
            self.energy.add(_rows_at(wanted_XO, lacking.read), counted)
            if lacking.weights is not None:
                self.weights.append(lacking.weights if lacking.counts is None else lacking.weights[lacking.counts])

    def variance(self) -> float:
        """Return the variance of the target, divided by the mean weight of places as the sums are."""
        return self.energy.variance() / (float(torch.cat(self.weights).double().mean()) if self.weights else 1.0)

    def moments(self) -> SplitStatistics:
        return [each.moments() for each in (self.fit, self.held_out) if not each.is_empty]

    def groups(self) -> Iterator[tuple[RegressionSums, RegressionSums]]:
        """Return the sums of the residual on all columns, for the fit and held out, group by group."""
        return zip(self.fit.regressions(), self.held_out.regressions(), strict=True)


def sum_layers(
    segment: Segment, pieces: Sequence[Piece], targets: Mapping[CalledLayer, Target | None]
) -> dict[CalledLayer, LayerSums]:
    """Sum layers' inputs in one run of the student, and residuals to targets, if any, in one of the dense model."""
    program = segment.student.program
    sums = {
        layer: LayerSums.of(layer_as_module(program, layer), layer.name, is_fitted=target is not None)
        for layer, target in targets.items()
    }
    reading = {layer: layer.node.all_input_nodes[0] for layer in targets}
    targets_set = [target for target in targets.values() if target is not None]
    dense_nodes = segment.up_to([end for target in targets_set for end in target.dense_ends])
    nodes = segment.up_to([*reading.values(), *(end for target in targets_set for end in target.student_ends)])
    for piece in pieces:
        student = segment.run_student(piece, nodes)
        dense: Values = segment.run_dense(piece, dense_nodes) if targets_set else {}
        for layer, target in targets.items():
            lacking = None
            if target is not None:
                lacking = target.residual(segment.as_merged(dense, student, layer.node, target.dense_ends), student)
            weights_BN = segment.weights_at(piece, student, layer.node)
            sums[layer].add(layer, student[reading[layer]], lacking, weights_BN, held_out=piece.held_out)
    for layer, own in sums.items():
        for half in own.moments():
            # A NaN in any input makes these sums NaN.
            assert not isinstance(half, HeadMoments), layer.name
            refuse_nonfinite(layer.name, half.sum_F if isinstance(half, ChannelMoments) else half.sum_GU)
    return sums


def sum_heads(segment: Segment, site: TracedPairs, pieces: Sequence[Piece], *, system: bool) -> SplitStatistics:
    """Return the moments of a site's queries and keys in the student, with CORP's per-image system if `system`."""
    tracing, (taps,) = segment.student.tracing, site.listening()
    nodes = segment.up_to([tracing.by_node[name] for name in site.sources])
    sums = dict[bool, SiteSums]()
    for piece in pieces:
        if piece.held_out not in sums:
            sums |= {piece.held_out: build_sums([taps], Options(attention_system=system))[site.name]}
        own, values = sums[piece.held_out], segment.run_student(piece, nodes)
        weights_BN = segment.weights_at(piece, values, nodes[-1])
        weights = None if weights_BN is None else pass_weights(weights_BN, weights_BN.device)

        def hear(_: str, role: Role, x: Tensor, own: SiteSums = own, weights: PassWeights | None = weights) -> None:
            own.add(role, x, weights)

        with listening_to_sites([taps], hear):
            for name in site.sources:
                tracing.hooked[2][name](values[tracing.by_node[name]])
        own.flush()
    return [moments_on_device(sums[each].moments(), segment.student.where) for each in sorted(sums)]
