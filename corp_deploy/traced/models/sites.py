"""What a model offers to reduction: its sites, and the places that are refused.

Sites are found in the traced program; a site tells where to listen, what it costs at any width and how it is written
down. What is done to a site is no business of it (see reduction/kinds.py).
"""

from dataclasses import dataclass

from torch import nn

from calib.sites import ChannelTaps, HeadTaps, PatchTaps

from .site import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A site that can't be reduced, and why."""

    name: str
    reason: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """What a model offers to reduction, in order of its program."""

    every: tuple[Site, ...]
    refused: tuple[Refusal, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """Of all places, those refused too."""
        return frozenset({*(site.kind for site in self.every), *(refusal.kind for refusal in self.refused)})

    @property
    def widths(self) -> dict[str, int]:
        return {site.name: site.width for site in self.every}

    @property
    def by_name(self) -> dict[str, Site]:
        return {site.name: site for site in self.every}


def calibration_taps(model: nn.Module, sites: Sites) -> list[ChannelTaps | HeadTaps | PatchTaps]:
    """Where calibration listens for every site, in the order they run; not where a constant is all that is left."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    listened = [site for site in sites.every if site.width]
    if all(site.name in order for site in listened):
        listened.sort(key=lambda site: order[site.name])
    taps = [tap for site in listened for tap in site.listening()]
    return list({tap.name: tap for tap in taps}.values())  # what reads several sites is heard once
