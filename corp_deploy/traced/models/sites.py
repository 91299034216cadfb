"""Sites that a model offers to reduction: groups of elements with the layers that read them, and refused sites.

A site tells where to hook, what it costs and how it is recorded; reduction/kinds.py decides what is done to it.

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
    """A grouped layer's group `number`: its rows of the weight, and the site's groups that it reads, by its columns."""

    number: int
    rows: slice
    groups_C: Index
    columns_CM: Index

    def among(self, columns: Index) -> "Portion":
        """Return the portion with only those of the site's groups that these columns of it read."""
        is_among_C = np.isin(self.columns_CM, columns).all(axis=1)
        return replace(self, groups_C=self.groups_C[is_among_C], columns_CM=self.columns_CM[is_among_C])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteReader:
    """A layer that reads a site's groups, with the indices columns_GM [G,M] of these among its inputs.

    `source`: the node that it reads. `gain_O`: the factors of a batch norm right after it. `is_squeeze`: it reads
    means of maps that others read. `is_biasless`: it gets no bias. `use`: the number of this use of the layer. `merge`:
    the last token merge before it.
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
        """The name of its input's statistics, the same for all sites that the layer reads."""
        return self.weight.removesuffix(".weight") + (f"#{self.use + 1}" if self.use else "")

    @property
    def portions(self) -> tuple[Portion, ...]:
        """The portions of the layer's groups that read the site; empty if one reads some groups in more columns."""
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
        """The layer's weight times the factors of a batch norm right after it, float64."""
        return scale_rows(self.layer.weight.detach().double(), self.gain_O)

    @property
    def tap(self) -> ChannelTaps | PatchTaps:
        if isinstance(self.layer, nn.Linear):
            return ChannelTaps(name=self.name, output=self.layer, merge=self.merge)
        return PatchTaps(name=self.name, output=self.layer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A place of a model whose width can be reduced by removing groups.

    `macs_now`, `parameters_now`: the costs that all its groups have. `whole_removal`: the layers around it, if a
    constant can replace all groups. `multiple`: the number that widths are multiples of by default.
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
        """The number of parts, which keep equally many groups."""
        return self.groups.parts

    @property
    def tied(self) -> str:
        """A name that sites of equal width share if heads are square, or empty."""
        return ""

    def listening(self) -> tuple[ChannelTaps | PatchTaps, ...]:
        """Return the taps of every layer that reads the groups."""
        return tuple(each.tap for each in self.readings)

    def describe(self) -> str:
        of_parts = f", {self.width // self.parts} in each of {self.parts}" if self.parts > 1 else ""
        rows = self.groups.writers[0].index_GM.shape[1]
        if self.groups.kind == "convolution channels" and rows > 1:
            return f"{self.groups.kind} {self.width * rows} in groups of {rows}{of_parts}"
        return f"{self.groups.kind} {self.width}{of_parts}"

    @property
    def cost_signature(self) -> str:
        """A text that is equal for sites of the same cost."""
        return f"{self.groups.kind} of {self.width}"

    def as_metadata(self) -> dict[str, int]:
        """Return the width by the key `groups`, as a graph's metadata record it."""
        return {"groups": self.width}

    def writing_GX(self) -> Tensor:
        """Return the rows of weights that write each group, scaled by norms after them, float64, without biases."""
        written = [(weight_with_gain(self.program, each.name), each) for each in self.groups.writers]
        parts = list[Tensor]()
        for weight, span in [(weight, span) for weight, span in written if weight.dim() > 1] or written:
            others = [dim for dim in range(weight.dim()) if dim not in span.axes]
            flat = weight.permute(*span.axes, *others).flatten(0, len(span.axes) - 1)
            parts.append(flat[torch.from_numpy(span.index_GM).to(flat.device)].flatten(1))
        return torch.cat(parts, dim=1)


class TracedChannels(Site):
    """Channels, plain or gated, between linear layers and 1x1 convolutions."""

    kind: ClassVar[str] = "traced channels"

    def units(self) -> Units | str:
        """Return the channels as units that can be merged, or the reason why none can."""
        if any(not _is_by_place(each) for each in self.readings) or any(each.use for each in self.readings):
            return "not every layer that reads it reads each place once and by itself, so that none can be merged"
        return channel_units(self.program, self.groups, [each.source for each in self.readings])


def _is_by_place(reading: SiteReader) -> bool:
    layer = reading.layer
    is_one = isinstance(layer, nn.Linear) or (layer.kernel_size, layer.stride, layer.groups) == ((1, 1), (1, 1), 1)
    return is_one and not reading.is_squeeze


class TracedConvolutions(Site):
    """Channels of maps that convolutions of kernels larger than 1x1 write or read."""

    kind: ClassVar[str] = "traced convolutions"


class TracedStream(Site):
    """A stream that several layers add to, or one between blocks without a shortcut (arXiv 1801.04381)."""

    kind: ClassVar[str] = "traced streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A site that can't be reduced, with the reason."""

    name: str
    reason: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """The sites that a model offers to reduction and the refused ones, in order of its program."""

    every: tuple[Site, ...]
    refused: tuple[Refusal, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all sites, refused ones included."""
        return frozenset({*(site.kind for site in self.every), *(refusal.kind for refusal in self.refused)})

    @property
    def widths(self) -> dict[str, int]:
        return {site.name: site.width for site in self.every}

    @property
    def by_name(self) -> dict[str, Site]:
        return {site.name: site for site in self.every}


def calibration_taps(model: nn.Module, sites: Sites) -> list[ChannelTaps | HeadTaps | PatchTaps]:
    """Return the taps of calibration in the order they run, without sites that are folded to a constant."""
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    listened = [site for site in sites.every if site.width]
    if all(site.name in order for site in listened):
        listened.sort(key=lambda site: order[site.name])
    taps = [tap for site in listened for tap in site.listening()]
    return list({tap.name: tap for tap in taps}.values())  # a layer that reads several sites has one tap
