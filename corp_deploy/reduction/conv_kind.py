"""Sites of convolutional networks: which widths, what each loses, and the reduction."""

from itertools import product
from typing import ClassVar

import torch
from torch import nn

from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.conv_site import ConvSite
from corp_deploy.families.steps import Branch
from corp_deploy.families.widths import ConvWidths, stepped_width

from .chosen import Chosen
from .chosen_patches import channels_between, elimination, error_of, kept_channels, output_energy
from .conv_loop import fitted_row, rebuilt_row
from .conv_modules import Row, conv_report, random_like, reading_of
from .kind import ErrorCurve, Reduced
from .loop import Loop
from .method import Method
from .report import HeldOut, SiteReport
from .row_moments import RowMoments, row_moments
from .streams import Streams

Orders = tuple[Elimination, ...]


class ConvKind:
    """See Kind."""

    eliminates: ClassVar[bool] = True

    def sparsity(self, method: Method) -> float | None:
        return method.conv_sparsity

    def moments_at(self, site: ConvSite, moments: Moments, device: torch.device) -> RowMoments:
        return row_moments(site, moments, device)

    def rest_of(self, own: RowMoments, half: RowMoments) -> RowMoments:
        return own.less(half)

    def uniform(self, site: ConvSite, method: Method) -> ConvWidths | None:
        if method.conv_sparsity is None or self.refusal(site, method):
            return None
        return ConvWidths(channels=tuple(_aligned(site, place, method) for place in range(len(site.between))))

    def widths(self, site: ConvSite, method: Method) -> tuple[ConvWidths, ...]:
        """As many as the place of most choices has, the others in step with it."""
        choices = _choices(site, method)
        longest = max(map(len, choices))
        shares = [(place + 1) / longest for place in range(longest)]
        widths = [
            ConvWidths(channels=tuple(each[max(round(share * len(each)) - 1, 0)] for each in choices))
            for share in shares
        ]
        return tuple(dict.fromkeys(widths))

    def offers(self, site: ConvSite, method: Method) -> tuple[ConvWidths, ...]:
        if self.refusal(site, method):
            return (site.width,)
        return tuple(ConvWidths(channels=channels) for channels in product(*_choices(site, method)))

    def refusal(self, site: ConvSite, method: Method) -> str:
        if method.conv_recovery == "keep":
            return "this preset's method has no form for convolutions"
        return ""

    def note(self, site: ConvSite, method: Method, width: ConvWidths | None) -> str | None:
        return None

    def chosen(
        self, site: ConvSite, moments: RowMoments, method: Method, width: ConvWidths, known: Orders | None = None
    ) -> tuple[Chosen, ...]:
        choices = list[Chosen]()
        for place, channels in enumerate(width.channels):
            own, order = moments.patches[site.between[place].reader], None if known is None else known[place]
            choices.append(Chosen(kept_K=kept_channels(own, reading_of(site, place), method, channels, order)))
        return tuple(choices)

    def reduced(
        self,
        site: ConvSite,
        moments: RowMoments,
        method: Method,
        width: ConvWidths,
        *,
        known: Orders | tuple[Chosen, ...] | None = None,
        held_out: RowMoments | None = None,
        halves: tuple[RowMoments, RowMoments] | None = None,
    ) -> Reduced:
        row, reports = Row.of(site), list[SiteReport]()
        for place, channels in enumerate(width.channels):
            between, reading = site.between[place], reading_of(site, place)
            own = moments.patches[between.reader]
            by_half = None if halves is None else (halves[0].patches[between.reader], halves[1].patches[between.reader])
            kept = channels_between(own, reading, method, channels, None if known is None else known[place], by_half)
            row.narrow(between, kept)
            for name in site.squeezes(between):
                row.squeeze(name, kept.kept_K, moments.means[name], method)
            judged = None
            if held_out is not None:
                other = held_out.patches[between.reader]
                judged = HeldOut(energy=output_energy(other, reading), error=error_of(kept, reading, other))
            reports.append(conv_report(site, place, method, kept, output_energy(own, reading), judged))
        return row.reduced(reports)

    def completed(self, site: ConvSite, new: Reduced, moments: Moments, method: Method, where: torch.device) -> Reduced:
        return new

    def elimination(self, site: ConvSite, moments: RowMoments, method: Method) -> Orders:
        places = range(len(site.between))
        return tuple(
            elimination(moments.patches[site.between[place].reader], reading_of(site, place), method)
            for place in places
        )

    def curves(self, site: ConvSite, moments: RowMoments, method: Method, known: Orders | None) -> list[ErrorCurve]:
        """One a place, all else of the row whole."""
        offers = self.offers(site, method)
        if len(offers) == 1:
            return []
        orders = known or self.elimination(site, moments, method)
        curves, dense = [], site.width.channels
        for place, choices in enumerate(_choices(site, method)):
            alone = [ConvWidths(channels=(*dense[:place], each, *dense[place + 1 :])) for each in choices]
            curves.append(
                ErrorCurve(
                    errors=tuple(map(orders[place].error_at, choices)),
                    alone=tuple(alone),
                    places=tuple(choices.index(offer.channels[place]) for offer in offers),
                )
            )
        return curves

    def rebuilt(self, branch: Branch, site: ConvSite, streams: Streams, method: Method, width: ConvWidths) -> Reduced:
        return rebuilt_row(branch, site, streams, method, width)

    def fitted(
        self, step: Branch, site: ConvSite, streams: Streams, method: Method, width: ConvWidths, loop: Loop
    ) -> tuple[Reduced, list[SiteReport]]:
        return fitted_row(step, site, streams, method, width, loop)

    def layer(self, site: ConvSite, layer: nn.Module, method: Method, width: ConvWidths) -> nn.Module:
        return random_like(site.of_layer(layer), width)


def _choices(site: ConvSite, method: Method) -> list[tuple[int, ...]]:
    """The channels that may stay at each place, fewest first."""
    return [
        (*range(step, dense, step), dense)
        for place, dense in enumerate(site.width.channels)
        for step in (site.step(place, method.align_conv),)
    ]


def _aligned(site: ConvSite, place: int, method: Method) -> int:
    """The share kept, to the nearest multiple."""
    return stepped_width(site.width.channels[place], method.conv_kept, site.step(place, method.align_conv))
