"""One branch of linear layers in a closed loop: aligned, reduced and fitted to the dense model's residual stream.

Legend: B images, N tokens, C channels, K inputs of a last layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from corp_deploy.algebra.regression_sums import RegressionSums
from corp_deploy.families.site import LinearSite
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import Width

from .branch_sums import Halves, alignment_sums
from .correct import correct_, correct_through_
from .kind import LinearReduced, Reduced
from .loop import Loop
from .method import Method
from .report import LoopFit, SiteReport
from .streams import Streams
from .uncentred import differences_uncentred, regression_uncentred


@dataclass(frozen=True, slots=True, kw_only=True)
class OnStreams:
    """A site reduced on the streams of a closed loop: its new layer, and what the reduced stream lacks of the dense one
    behind it, on what enters its last linear layer. `energy` is the dense stream's there.
    """

    new: LinearReduced
    lacking: Halves[RegressionSums]
    energy: float


class LinearKind(Protocol):
    """What a closed loop asks of a kind of sites of linear layers."""

    reads_every_token: ClassVar[bool]
    """Whether a branch's layer reads all tokens, whichever are read behind the branch."""

    def rebuilt(self, branch: Branch, site: Any, streams: Streams, method: Method, width: Any) -> LinearReduced:
        """Reduced by the statistics of what enters the branch on the model as reduced so far."""
        ...

    def on_streams(
        self,
        branch: Branch,
        site: Any,
        step: Branch,
        streams: Streams,
        method: Method,
        width: Any,
        *,
        refit: Sequence[float] | None = None,
    ) -> OnStreams:
        """Reduced by the statistics of what enters the branch on the model as reduced so far, the dense stream taken
        through `step` on the way; `branch` may have an aligned layer of its own.

        `refit`: the ridges by one of which a dense last layer is fitted to that stream before anything is chosen by it.
        """
        ...


def _aligned(
    kind: LinearKind, branch: Branch, site: LinearSite, streams: Streams, loop: Loop
) -> tuple[Branch, LinearSite, LoopFit]:
    """The branch with a first layer of its own that is fitted to the dense stream's results."""
    first = site.stacked_first()
    read = None if kind.reads_every_token else branch.read
    sums = alignment_sums(branch, site.first.in_features, streams, read)
    if site.biasless and site.first.bias is None:
        sums = sums.each(differences_uncentred)
    fit = correct_through_(first, sums.fit, sums.held_out, strengths=loop.strengths, both_ways=streams.in_halves)
    layer = site.with_first(branch.layer, first)
    return replace(branch, layer=layer), site.of_layer(layer), fit


def through_scale(last: nn.Linear, scale_C: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weight and bias with which a last layer enters the residual stream, through the layer scale."""
    weight_CK = last.weight.detach().double()
    bias_C = weight_CK.new_zeros(len(weight_CK)) if last.bias is None else last.bias.detach().double()
    return (
        (weight_CK, bias_C) if scale_C is None else (weight_CK * scale_C.double()[:, None], bias_C * scale_C.double())
    )


def _fitted(branch: Branch, reduced: OnStreams, loop: Loop, *, both_ways: bool) -> LoopFit:
    """The new layer's last linear layer is made to give what the reduced stream lacks still."""
    last = reduced.new.last
    weight_CK, bias_C = through_scale(last, branch.gain_C)
    left = reduced.lacking.each(lambda sums: sums.less(weight_CK, bias_C))
    return correct_(
        last,
        left.fit,
        left.held_out,
        scale_C=branch.gain_C,
        energy=reduced.energy,
        strengths=loop.strengths,
        both_ways=both_ways,
    )


def fitted_linear(
    kind: LinearKind, step: Branch, site: LinearSite, streams: Streams, method: Method, width: Width, loop: Loop
) -> tuple[Reduced, list[SiteReport]]:
    """Align, reduce and fit one branch; the dense stream is behind it then, the reduced one still before it."""
    branch, alignment = step, None
    if loop.align_inputs:
        branch, site, alignment = _aligned(kind, step, site, streams, loop)
    refit = loop.strengths if loop.refit_first else None
    reduced = kind.on_streams(branch, site, step, streams, method, width, refit=refit)
    if site.biasless:
        reduced = replace(reduced, lacking=reduced.lacking.each(regression_uncentred))
    fit = _fitted(branch, reduced, loop, both_ways=streams.in_halves)
    first, *rest = reduced.new.reports
    reports = [replace(first, alignment=alignment), *rest]
    return reduced.new, [*reports[:-1], replace(reports[-1], loop=fit)]
