"""Channel sites: which widths, what each loses, and the reduction, on moments and on the streams of a closed loop."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from calib.combination import without
from calib.moments import ChannelMoments, Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.modules import with_modules
from corp_deploy.families.steps import Branch
from corp_deploy.families.traced_units import GATED
from corp_deploy.families.widths import aligned_width, aligned_widths, is_empty

from .branch_sums import channel_sums, dense_advanced, halves_of, inputs_sums
from .channel_modules import built, channel_report, emptied, layers_of
from .channel_target import refitted
from .channels import Halves, channels_at_site, elimination, kept_channels, output_energy
from .chosen import Chosen
from .folded_channels import folded_channels, given_by
from .judged_folds import See, judged_folds
from .kind import ErrorCurve, LinearReduced, Reduced
from .linear_loop import OnStreams, fitted_linear
from .loop import Loop
from .method import Method
from .report import SiteReport
from .statistics import statistics_at
from .streams import Streams
from .uncentred import channels_uncentred


class ChannelKind:
    """See Kind."""

    eliminates: ClassVar[bool] = True
    reads_every_token: ClassVar[bool] = False

    def moments_at(self, site: ChannelSite, moments: Moments, device: torch.device) -> ChannelMoments:
        own = statistics_at(site, moments, ChannelMoments, device)
        return channels_uncentred(own) if site.biasless else own

    def rest_of(self, own: ChannelMoments, half: ChannelMoments) -> ChannelMoments:
        return without(own, half)

    def sparsity(self, method: Method) -> float | None:
        return method.mlp_sparsity

    def uniform(self, site: ChannelSite, method: Method) -> int | None:
        if method.mlp_sparsity is None or is_empty(site.width) or self.refusal(site, method):
            return None
        return aligned_width(site.width, method.mlp_kept, _multiple(site, method))

    def widths(self, site: ChannelSite, method: Method) -> tuple[int, ...]:
        return aligned_widths(site.width, _multiple(site, method))

    def offers(self, site: ChannelSite, method: Method) -> tuple[int, ...]:
        if self.refusal(site, method):
            return (site.width,)
        return (0,) * method.empties + self.widths(site, method)

    def refusal(self, site: ChannelSite, method: Method) -> str:
        if method.merges and site.gated:
            return GATED
        return ""

    def note(self, site: ChannelSite, method: Method, width: int | None) -> str | None:
        return None

    def chosen(
        self,
        site: ChannelSite,
        moments: ChannelMoments,
        method: Method,
        width: int,
        known: Elimination | None = None,
    ) -> Chosen | None:
        if width == 0:
            return None
        return Chosen(kept_K=kept_channels(moments, layers_of(site), method, width, known))

    def reduced(
        self,
        site: ChannelSite,
        moments: ChannelMoments,
        method: Method,
        width: int,
        *,
        known: Elimination | Chosen | None = None,
        held_out: ChannelMoments | None = None,
        halves: Halves | None = None,
    ) -> LinearReduced:
        if width == 0:
            return emptied(site, moments, method, held_out)
        new = channels_at_site(moments, layers_of(site), method, width, known, halves)
        return built(site, new, moments, method, held_out)

    def elimination(self, site: ChannelSite, moments: ChannelMoments, method: Method) -> Elimination:
        return elimination(moments, layers_of(site), method)

    def curves(
        self, site: ChannelSite, moments: ChannelMoments, method: Method, known: Elimination | None
    ) -> list[ErrorCurve]:
        widths = self.offers(site, method)
        if len(widths) == 1:
            return []
        order = known or self.elimination(site, moments, method)
        return [ErrorCurve(errors=tuple(map(order.error_at, widths)), alone=widths, places=tuple(range(len(widths))))]

    def layer(self, site: ChannelSite, layer: nn.Module, method: Method, width: int) -> nn.Module:
        return with_modules(layer, site.name, site.empty(width, output_bias=True)).eval()

    def rebuilt(self, branch: Branch, site: ChannelSite, streams: Streams, method: Method, width: int) -> LinearReduced:
        moments, _ = channel_sums(branch, site, streams)
        if method.merges:
            return _merged(branch, site, moments, streams, method, width)
        return self.reduced(site, moments, method, width)

    def fitted(
        self, step: Branch, site: ChannelSite, streams: Streams, method: Method, width: int, loop: Loop
    ) -> tuple[Reduced, list[SiteReport]]:
        return fitted_linear(self, step, site, streams, method, width, loop)

    def on_streams(
        self,
        branch: Branch,
        site: ChannelSite,
        step: Branch,
        streams: Streams,
        method: Method,
        width: int,
        *,
        refit: Sequence[float] | None = None,
    ) -> OnStreams:
        """The channels that stay are some of those summed; merged ones are new, so that layer is run once more."""
        energy = dense_advanced(step, streams)
        moments, on_all = channel_sums(branch, site, streams)
        if method.merges:
            new = _merged(branch, site, moments, streams, method, width)
            layer = with_modules(branch.layer, site.name, new.modules)
            return OnStreams(new=new, lacking=inputs_sums(branch, layer, new.last, streams), energy=energy)
        if width == 0:
            none_K = torch.zeros(0, dtype=torch.int64, device=streams.device)
            new = emptied(site, moments, method)
            return OnStreams(new=new, lacking=on_all.each(lambda sums: sums.of(none_K)), energy=energy)
        layers = layers_of(site)
        toward_stream = method.mlp_selection == "obs" and method.mlp_recovery == "affine" and branch.read is None
        if refit is not None and toward_stream:
            layers = refitted(layers, on_all, branch.gain_C, refit, both_ways=streams.in_halves)
        halves = halves_of(moments, on_all) if streams.in_halves else None
        at_site = channels_at_site(moments, layers, method, width, halves=halves)
        new, kept_K = built(site, at_site, moments, method, layers=layers), at_site.kept_K
        return OnStreams(new=new, lacking=on_all.each(lambda sums: sums.of(kept_K)), energy=energy)


def _multiple(site: ChannelSite, method: Method) -> int:
    return method.align_hidden if method.aligned else max(method.align_hidden, site.multiple)


def _merged(
    branch: Branch, site: ChannelSite, moments: ChannelMoments, streams: Streams, method: Method, width: int
) -> LinearReduced:
    """Fitted and judged on the reduced stream."""
    folded = folded_channels(site, branch.layer, moments, method, width)
    given = given_by(folded)

    def show(sees: Mapping[str, See]) -> None:
        for pair in streams:
            entering_BNC = branch.entering(pair.reduced)
            sees[site.name](*given(entering_BNC, branch.layer(entering_BNC)), False)

    judged = judged_folds({site.name: folded}, method, show)[site.name]
    report = channel_report(site, method, judged.recovery, output_energy(moments, folded.layers), None)
    modules = folded.modules(judged.recovery.weight_OK, judged.recovery.bias_O)
    return LinearReduced(modules={**modules}, last=folded.last(modules), reports=[report])
