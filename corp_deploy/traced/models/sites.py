"""What a model offers to reduction: its sites, groups of elements with the layers that read them, and the places that
are refused.

Sites are found in the traced program; a site tells where to listen, what it costs at any width and how it is written
down. What is done to a site is no business of it (see reduction/kinds.py).

Legend: G groups, M places of a group among a layer's inputs, X weights that write a group.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from calib.sites import ChannelTaps, HeadTaps, PatchTaps
from corp_deploy.traced.finding.site_groups import Index, SiteGroups
from corp_deploy.traced.narrowing.whole_removal import WholeRemoval
from corp_deploy.traced.programs.program import Program
from corp_deploy.traced.programs.readers import Layer, scale_rows, weight_with_gain

from .units import Units, channel_units

Currency = Literal["macs", "params"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Portion:
    """A group of a layer's outputs, the rows of its weight, and of which groups of a site it reads which of its own
    columns; of a layer of one group all.
    """

    number: int
    rows: slice
    groups_C: Index
    columns_CM: Index

    def among(self, columns: Index) -> "Portion":
        """What it reads by these of its columns alone."""
        is_among_C = np.isin(self.columns_CM, columns).all(axis=1)
        return replace(self, groups_C=self.groups_C[is_among_C], columns_CM=self.columns_CM[is_among_C])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteReader:
    """A layer that reads a site's groups, where they stand among its inputs, and the names of its weight and bias;
    `source`: the node that gives what it reads. `gain_O`: by what a batch norm right behind it multiplies its outputs;
    `is_squeeze`: it reads the means of maps that others read; `is_biasless`: it gets no bias; `use`: which of a layer's
    uses this is; `merge`: what merged tokens before it.
    """

    layer: Layer
    source: str
    columns_GM: Index
    weight: str
    bias: str
    gain_O: Tensor | None
    is_squeeze: bool = False
    is_biasless: bool = False
    use: int = 0
    merge: nn.Module | None = None

    @property
    def name(self) -> str:
        """Of what is heard there, by all sites that the layer reads."""
        return self.weight.removesuffix(".weight") + (f"#{self.use + 1}" if self.use else "")

    @property
    def portions(self) -> tuple[Portion, ...]:
        """One for each group of the layer that reads any of the site; none where one reads them unevenly."""
        groups = self.layer.groups if isinstance(self.layer, nn.Conv2d) else 1
        outputs, width = len(self.layer.weight) // groups, self.layer.weight.shape[1]
        found = list[Portion]()
        for number in range(groups):
            is_own_GM = self.columns_GM // width == number
            count_G = is_own_GM.sum(1)
            groups_C = np.flatnonzero(count_G)
            if len(groups_C) and len(set(count_G[groups_C].tolist())) > 1:
                return ()
            if len(groups_C):
                columns_CM = self.columns_GM[is_own_GM].reshape(len(groups_C), -1) - number * width
                rows = slice(number * outputs, (number + 1) * outputs)
                found.append(Portion(number=number, rows=rows, groups_C=groups_C, columns_CM=columns_CM))
        return tuple(found)

    @property
    def gained_weight(self) -> Tensor:
        """What the layer and a batch norm right behind it multiply by, float64."""
        return scale_rows(self.layer.weight.detach().double(), self.gain_O)

    @property
    def tap(self) -> ChannelTaps | PatchTaps:
        if isinstance(self.layer, nn.Linear):
            return ChannelTaps(name=self.name, output=self.layer, merge=self.merge)
        return PatchTaps(name=self.name, output=self.layer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A place whose width can be reduced: groups that can be removed. `macs_now`, `parameters_now`: what goes with all.
    `whole_removal`: where all can go, so that a constant is left. `multiple`: what widths are best a multiple of, where
    nobody says.
    """

    kind: ClassVar[str]
    name: str
    groups: SiteGroups
    readings: tuple[SiteReader, ...]
    program: Program
    macs_now: int
    parameters_now: int
    whole_removal: WholeRemoval | None = None
    multiple: int = 1

    @property
    def width(self) -> int:
        return self.groups.size

    @property
    def parts(self) -> int:
        """Of which each keeps as many groups."""
        return self.groups.parts

    @property
    def tied(self) -> str:
        """What sites have in common that are as wide as each other where heads are square, or nothing."""
        return ""

    def listening(self) -> tuple[ChannelTaps | PatchTaps, ...]:
        """To every layer that reads the groups."""
        return tuple(each.tap for each in self.readings)

    def describe(self) -> str:
        of_parts = f", {self.width // self.parts} in each of {self.parts}" if self.parts > 1 else ""
        rows = self.groups.writers[0].index_GM.shape[1]
        if self.groups.kind == "convolution channels" and rows > 1:
            return f"{self.groups.kind} {self.width * rows} in groups of {rows}{of_parts}"
        return f"{self.groups.kind} {self.width}{of_parts}"

    @property
    def cost_signature(self) -> str:
        """What two sites that cost the same have in common, for people."""
        return f"{self.groups.kind} of {self.width}"

    def as_metadata(self) -> dict[str, int]:
        """The widths that a graph carries."""
        return {"groups": self.width}

    def writing_GX(self) -> Tensor:
        """The rows of weights that write each group, norms behind them among them, float64; of no biases."""
        written = [(weight_with_gain(self.program, each.name), each) for each in self.groups.writers]
        parts = list[Tensor]()
        for weight, span in [(weight, span) for weight, span in written if weight.dim() > 1] or written:
            others = [dim for dim in range(weight.dim()) if dim not in span.axes]
            flat = weight.permute(*span.axes, *others).flatten(0, len(span.axes) - 1)
            parts.append(flat[torch.from_numpy(span.index_GM).to(flat.device)].flatten(1))
        return torch.cat(parts, dim=1)


class TracedChannels(Site):
    """Between layers of which none is a convolution of several places; plain or gated."""

    kind: ClassVar[str] = "traced channels"

    def units(self) -> Units | str:
        """Channels that can be merged, or why none can."""
        if any(not _is_by_place(each) for each in self.readings) or any(each.use for each in self.readings):
            return "not every layer that reads it reads each place once and by itself, so that none can be merged"
        return channel_units(self.program, self.groups, [each.source for each in self.readings])


def _is_by_place(reading: SiteReader) -> bool:
    layer = reading.layer
    is_one = isinstance(layer, nn.Linear) or (layer.kernel_size, layer.stride, layer.groups) == ((1, 1), (1, 1), 1)
    return is_one and not reading.is_squeeze


class TracedConvolutions(Site):
    """Of maps."""

    kind: ClassVar[str] = "traced convolutions"


class TracedStream(Site):
    """That several layers write and add up, or one between blocks without a shortcut (arXiv 1801.04381)."""

    kind: ClassVar[str] = "traced streams"


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
