"""What a closed loop sums over both streams at one branch, in as few runs of its layers as the algebra allows.

An MLP's hidden channels are summed once, before any is chosen: the regression on those kept is a part of the sums. The
dense stream is advanced on the way, so that what the reduced one lacks of it is known. Where a norm follows the layer
that is brought in front of it (algebra/norm_behind.py), and tokens count by how much the norm passes of a change there.

Legend: B images of a piece, N tokens, C channels of the stream, F hidden channels, K inputs of a last linear layer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from calib.active import ACTIVE_EPS
from calib.combination import added
from calib.hooks import listening
from calib.moments import ChannelMoments, HeadMoments, on_device
from calib.products import add_active_
from calib.sites import Role
from calib.sums import HeadSums
from calib.weights import Weights, weights_of
from corp_deploy.algebra.norm_behind import NormBehind
from corp_deploy.algebra.regression_sums import DifferenceSums, Gram, RegressionSums
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.head_site import HeadSite
from corp_deploy.families.steps import Branch
from ground.errors import BadInput

from .streams import Pair, Streams
from .uncentred import gram_uncentred, heads_uncentred, regression_uncentred

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves(Generic[S]):
    """The same sums over the images of the fit and over those held out."""

    fit: S
    held_out: S

    def of(self, pair: Pair) -> S:
        return self.held_out if pair.held_out else self.fit

    def each(self, change: Callable[[S], T]) -> "Halves[T]":
        return Halves(fit=change(self.fit), held_out=change(self.held_out))


class _Heard(Exception):
    """Ends a layer whose rest would compute nothing that is asked for."""


@contextmanager
def _entering(branch: Branch, layer: nn.Module, last: nn.Linear) -> Iterator[Callable[[Pair], Tensor]]:
    """Within it: what of the reduced stream enters the last linear layer of a branch's layer, which is not run."""
    heard: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        heard.append(inputs[0])
        raise _Heard

    def run(pair: Pair) -> Tensor:
        with suppress(_Heard):
            branch.run(layer, pair.reduced, pair.present_BN)
        return heard.pop()

    handle = last.register_forward_pre_hook(stop)
    try:
        yield run
    finally:
        handle.remove()


def _others(tokens: Tensor, count: int) -> Tensor:
    is_other_N = torch.ones(count, dtype=torch.bool, device=tokens.device)
    is_other_N[tokens] = False
    return is_other_N.nonzero().squeeze(1)


def refuse_nonfinite(site: str, sums: Tensor) -> None:
    if not bool(torch.isfinite(sums).all()):
        raise BadInput(
            f"{site}: NaN or Inf in the activations; (a) the weights or an image hold NaN or Inf, or (b) what is left "
            "of the model overflows: reduce less"
        )


def _norm_behind(branch: Branch) -> NormBehind | None:
    """Of which the stream has `branch.gain_C` times what it gives by itself."""
    if branch.behind is None:
        return None
    bias_C = branch.behind.bias
    offset_C = None if bias_C is None else bias_C.detach() * (1.0 if branch.scale_C is None else branch.scale_C)
    return NormBehind(gain_C=branch.gain_C, offset_C=offset_C, eps=branch.behind.eps)


def _weights(branch: Branch, pair: Pair, tokens: Tensor | None = None) -> Tensor | None:
    """By how much rows of the reduced stream count, among these tokens (None: all), None for all alike."""
    weights_BN, norm = pair.row_weights(tokens), _norm_behind(branch)
    if norm is None or pair.given_BNC is None:
        return weights_BN
    passed_BN = norm.passed(pair.rows(pair.given_BNC, tokens))
    return passed_BN if weights_BN is None else weights_BN * passed_BN


def _lacking(branch: Branch, pair: Pair) -> Tensor:
    """What the reduced stream lacks of the dense one, on the tokens read, in front of a norm behind the layer."""
    rows = (pair.rows(branch.rows(x_BNC), branch.read) for x_BNC in (pair.target, branch.carried(pair.reduced)))
    target_BNC, reduced_BNC = rows
    norm = _norm_behind(branch)
    if norm is None or pair.given_BNC is None:
        return target_BNC - reduced_BNC
    return norm.before(target_BNC - reduced_BNC, pair.rows(pair.given_BNC, branch.read))


def _add_lacking(branch: Branch, lacking: Halves[RegressionSums], pair: Pair, entering_BNK: Tensor) -> None:
    rows_BNK = pair.rows(entering_BNK, branch.read)
    lacking.of(pair).add(rows_BNK, _lacking(branch, pair), _weights(branch, pair, branch.read))


def alignment_sums(branch: Branch, width: int, streams: Streams, read: Tensor | None) -> Halves[DifferenceSums]:
    """Behind the branch's norm, where the layer has `width` inputs: the reduced stream as inputs, what the dense one
    has beyond it as differences.
    """
    where = streams.device
    sums = Halves(fit=DifferenceSums.empty(width, where), held_out=DifferenceSums.empty(width, where))
    for pair in streams:
        x_BNC = pair.rows(branch.entering(pair.reduced), read)
        d_BNC = pair.rows(branch.entering(pair.target), read) - x_BNC
        sums.of(pair).add(x_BNC, d_BNC, pair.row_weights(read))
    return sums


class StreamEnergy:
    """Variance of a stream over some tokens of every image, summed over the channels."""

    def __init__(self) -> None:
        self._count, self._sums, self._squares = 0.0, list[Tensor](), list[Tensor]()

    def add(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> None:
        x_XC = x_BNC.flatten(0, 1).double()
        weighted_XC = x_XC if weights_BN is None else x_XC * weights_BN.double().flatten().unsqueeze(1)
        self._count += len(x_XC) if weights_BN is None else float(weights_BN.double().sum())
        self._sums.append(weighted_XC.sum(dim=0))
        self._squares.append((weighted_XC * x_XC).sum())

    def variance(self) -> float:
        mean_C = torch.stack(self._sums).sum(dim=0) / self._count
        return float(torch.stack(self._squares).sum() / self._count - mean_C.square().sum())


def dense_advanced(branch: Branch, streams: Streams) -> float:
    """Takes the dense stream through the branch; its energy behind it, over the tokens read, in the unit of what is
    summed there: by the mean weight of a token.
    """
    energy, weights = StreamEnergy(), list[Tensor]()
    for pair in streams:
        pair.advance_dense(branch)
        energy.add(pair.rows(branch.rows(pair.target), branch.read), pair.row_weights(branch.read))
        if branch.behind is not None:
            weights_BN = _weights(branch, pair, branch.read)
            assert weights_BN is not None, branch.name
            weights.append(weights_BN.flatten())
    return energy.variance() / (float(torch.cat(weights).double().mean()) if weights else 1.0)


def head_moments(branch: Branch, site: HeadSite, streams: Streams, *, system: bool) -> HeadMoments:
    """Of the branch's layer on the reduced stream; `site` is that layer's."""
    return head_moments_in_halves(branch, site, streams, system=system)[0]


def head_moments_in_halves(
    branch: Branch, site: HeadSite, streams: Streams, *, system: bool
) -> tuple[HeadMoments, tuple[HeadMoments, HeadMoments] | None]:
    """The same with those of either half, where the streams are in halves."""
    taps = site.taps()
    how: dict[str, Any] = {"causal": taps.causal, "plane_scale": taps.plane_scale}
    fit, held_out = (HeadSums(system=system, **how) for _ in range(2))
    by_half = Halves(fit=fit, held_out=held_out)
    sums = by_half.fit
    weights: Weights | None = None

    def hear(_: str, role: Role, activation: Tensor) -> None:
        sums.add(role, activation, weights)
        if role == "z":
            raise _Heard

    with listening([site.taps()], hear):
        for pair in streams:
            sums = by_half.of(pair) if streams.in_halves else by_half.fit
            weights = None if pair.present_BN is None else weights_of(pair.present_BN, streams.device)
            with suppress(_Heard):
                branch.run(branch.layer, pair.reduced, pair.present_BN)
            sums.flush()
    moments, halves = on_device(by_half.fit.moments(), streams.device), None
    if streams.in_halves:
        halves = moments, on_device(by_half.held_out.moments(), streams.device)
        moments = added(site.name, *halves)
    refuse_nonfinite(site.name, torch.cat([moments.energy_HD.flatten(), moments.z_sum_C]))
    if not site.biasless:
        return moments, halves
    return heads_uncentred(moments), halves and (heads_uncentred(halves[0]), heads_uncentred(halves[1]))


def _for_layer(last: nn.Linear) -> Halves[RegressionSums]:
    return Halves(fit=RegressionSums.for_layer(last), held_out=RegressionSums.for_layer(last))


def channel_sums(branch: Branch, site: ChannelSite, streams: Streams) -> tuple[ChannelMoments, Halves[RegressionSums]]:
    """Of the hidden channels of the branch's layer on the reduced stream: their moments, and what that stream lacks of
    the dense one, already behind the branch, on all of them; `site` is that layer's.
    """
    lacking, unread = _for_layer(site.last), Gram.empty(site.width, streams.device)
    active_F = torch.zeros(site.width, dtype=torch.float64, device=streams.device)
    with _entering(branch, branch.layer, site.last) as entering:
        for pair in streams:
            h_BNF = entering(pair)
            _add_lacking(branch, lacking, pair, h_BNF)
            if branch.read is not None:
                others = _others(branch.read, h_BNF.shape[1])
                unread.add(pair.rows(h_BNF, others), _weights(branch, pair, others))
            add_active_(active_F, pair.rows(h_BNF), ACTIVE_EPS, _weights(branch, pair))
    x = lacking.fit.x.with_those_of(lacking.held_out.x).with_those_of(unread)
    refuse_nonfinite(site.name, x.sum_K)
    if site.biasless:
        x, lacking = gram_uncentred(x), lacking.each(regression_uncentred)
    moments = ChannelMoments(tokens=x.tokens, eps=ACTIVE_EPS, sum_F=x.sum_K, gram_FF=x.gram_KK, active_F=active_F)
    return moments, lacking


def halves_of(moments: ChannelMoments, sums: Halves[RegressionSums]) -> tuple[ChannelMoments, ChannelMoments]:
    """The moments of either half of the images, over the tokens read; how active channels are is of all."""

    def of(x: Gram) -> ChannelMoments:
        return replace(moments, tokens=x.tokens, sum_F=x.sum_K, gram_FF=x.gram_KK)

    return of(sums.fit.x), of(sums.held_out.x)


def inputs_sums(branch: Branch, layer: nn.Module, last: nn.Linear, pairs: Iterable[Pair]) -> Halves[RegressionSums]:
    """What the reduced stream lacks of the dense one, already behind the branch, on what enters `last` of `layer`."""
    lacking = _for_layer(last)
    with _entering(branch, layer, last) as entering:
        for pair in pairs:
            _add_lacking(branch, lacking, pair, entering(pair))
    return lacking
