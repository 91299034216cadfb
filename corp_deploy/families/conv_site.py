"""Sites of convolutional networks: the channels between the convolutions of a row.

Legend: I and O the channels that enter and leave a convolution, K kept channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

from torch import nn

from calib.sites import ChannelTaps, PatchTaps
from ground.errors import BadInput

from .channel_norm import ChannelNorm
from .conv_block import ConvBlock
from .convolution import Convolution
from .squeeze import SqueezeExcite
from .widths import ConvWidths, Width, finer_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Channels between two convolutions of a row: by their names the one that writes them, the one that reads them, and
    what has weights by channel on the way.
    """

    writer: str
    reader: str
    along: tuple[str, ...]


Weighted = Convolution | SqueezeExcite | ChannelNorm
"""What has weights by channel."""


def channels_of(part: Weighted) -> tuple[int, int]:
    """That enter and leave a part."""
    if isinstance(part, SqueezeExcite):
        return part.channels, part.channels
    if isinstance(part, ChannelNorm):
        return part.num_channels, part.num_channels
    return part.in_channels, part.out_channels


def _between(row: Mapping[str, nn.Module]) -> tuple[Between, ...]:
    found: list[Between] = []
    writer, along = "", list[str]()
    for name, part in row.items():
        if isinstance(part, SqueezeExcite | ChannelNorm) or (isinstance(part, Convolution) and part.is_depthwise):
            along.append(name)
        elif isinstance(part, Convolution):
            if writer:
                found.append(Between(writer=writer, reader=name, along=tuple(along)))
            writer, along = name, []
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSite:
    """The row of a block. A width is kept channels between each two neighbours, depthwise convolutions, squeezes and
    norms keeping those of what stands before them.

    Where a convolution has groups, each keeps as many channels as the others; a norm's groups stay whole or go.
    """

    kind: ClassVar[str] = "convolutions"
    name: str
    block: ConvBlock

    @staticmethod
    def is_in(block: ConvBlock) -> bool:
        """Whether channels stand between two convolutions of a block; else all that it has are a stream's own."""
        return bool(_between(block.row))

    @staticmethod
    def refusal_of(block: ConvBlock) -> str:
        """Why no channels of a block can be removed, or nothing."""
        norms = any(isinstance(part, ChannelNorm) for part in block.row.values())
        if norms and any(each.groups > 1 for each in block.convolutions.values()):
            return "its norms' groups and its convolutions' can't both be kept"
        return ""

    @property
    def reason(self) -> str:
        return ""

    @property
    def between(self) -> tuple[Between, ...]:
        return _between(self.block.row)

    def convolution(self, name: str) -> Convolution:
        """By its name in the block."""
        return self.block.convolutions[name]

    def squeeze(self, name: str) -> SqueezeExcite:
        """By its name in the block."""
        module = self.block.get_submodule(name)
        assert isinstance(module, SqueezeExcite), (self.name, name)
        return module

    def squeezes(self, between: Between) -> tuple[str, ...]:
        """The squeezes that channels pass."""
        return tuple(name for name in between.along if isinstance(self.block.get_submodule(name), SqueezeExcite))

    @property
    def width(self) -> ConvWidths:
        return ConvWidths(channels=tuple(self.convolution(each.writer).out_channels for each in self.between))

    @property
    def size(self) -> int:
        return self.size_of(self.width)

    def size_of(self, width: Width) -> int:
        """Thousandths of the multiply-adds that a row has now."""
        assert isinstance(width, ConvWidths), (self.name, width)
        return round(1000 * self._row_macs(width) / self._row_macs(self.width))

    def groups(self, place: int) -> int:
        """Of which each must keep as many channels, at one place between convolutions."""
        between = self.between[place]
        return lcm(self.convolution(between.writer).groups, self.convolution(between.reader).groups)

    def unit(self, place: int) -> int:
        """Neighbouring channels that stay or go together there: those of a norm's group."""
        parts = (self.block.get_submodule(name) for name in self.between[place].along)
        return lcm(*(part.unit for part in parts if isinstance(part, ChannelNorm)))

    def _least(self, place: int) -> int:
        return lcm(self.groups(place), self.unit(place))

    def step(self, place: int, align: int) -> int:
        """What kept channels are a multiple of there."""
        return finer_step(self.width.channels[place], self._least(place), align)

    @property
    def first(self) -> Convolution:
        return next(iter(self.block.convolutions.values()))

    @property
    def last(self) -> Convolution:
        return self.block.last

    def entering(self, tokens: int) -> tuple[int, ...]:
        return self.first.in_channels, *self.block.grid

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.block,)

    def tokens_before(self, tokens: int) -> int:
        height, width = self.block.grid
        return height * width

    def tap_name(self, name: str) -> str:
        """Of the statistics of what enters a part."""
        return f"{self.name}.{name}"

    def patches(self, place: int) -> PatchTaps:
        """What the convolution behind one place reads."""
        name = self.between[place].reader
        return PatchTaps(name=self.tap_name(name), output=self.convolution(name), edges=self.convolution(name).edges)

    def listening(self) -> tuple[ChannelTaps | PatchTaps, ...]:
        squeezes = (name for each in self.between for name in self.squeezes(each))
        means = (ChannelTaps(name=self.tap_name(name), output=self.squeeze(name).reduce) for name in squeezes)
        return (*map(self.patches, range(len(self.between))), *means)

    def words(self) -> str:
        kept = " and ".join(str(channels) for channels in self.width.channels)
        return f"channels {kept}"

    def outline(self, geometry: Any) -> str:
        row = " to ".join(
            f"{each.out_channels}{f' of {each.taps} places' if each.taps > 1 else ''}"
            f"{f' in {each.groups} groups' if each.groups > 1 else ''}"
            for each in self.block.convolutions.values()
        )
        height, width = self.block.grid
        return f"convolutions of {height}x{width}, {self.first.in_channels} to {row}"

    def macs(self, width: Width, geometry: Any, tokens: int) -> int:
        assert isinstance(width, ConvWidths), (self.name, width)
        beside = sum(each.positions * each.weight.numel() for each in self.block.beside)
        return beside + self._row_macs(width)

    def _row_macs(self, width: ConvWidths) -> int:
        total = 0
        for part, inputs, outputs in self._sized(width):
            if not isinstance(part, Convolution):
                total += part.macs(inputs)
            else:
                groups = inputs if part.is_depthwise else part.groups
                total += part.positions * outputs * (inputs // groups) * part.taps
        return total

    def parameters(self, width: Width, geometry: Any) -> int:
        assert isinstance(width, ConvWidths), (self.name, width)
        total = sum(each.numel() for each in self.block.shortcut.parameters())
        for part, inputs, outputs in self._sized(width):
            if not isinstance(part, Convolution):
                total += sum(each.numel() for each in part.empty(inputs).parameters())
            else:
                groups = inputs if part.is_depthwise else part.groups
                total += outputs * (inputs // groups * part.taps + 1)
        return total

    def _sized(self, width: ConvWidths) -> list[tuple[Weighted, int, int]]:
        """Every part that has weights, with the channels that enter and leave it at these widths."""
        assert len(width.channels) == len(self.between), (self.name, width)
        kept = {each.writer: channels for each, channels in zip(self.between, width.channels, strict=True)}
        sized: list[tuple[Weighted, int, int]] = []
        channels = self.first.in_channels
        for name, part in self.block.row.items():
            if isinstance(part, SqueezeExcite | ChannelNorm):
                sized.append((part, channels, channels))
            elif isinstance(part, Convolution):
                outputs = channels if part.is_depthwise else kept.get(name, part.out_channels)
                sized.append((part, channels, outputs))
                channels = outputs
        return sized

    def as_json(self) -> dict[str, Any]:
        return {"channels": list(self.width.channels)}

    def as_metadata(self) -> dict[str, int]:
        return {each.writer: self.convolution(each.writer).out_channels for each in self.between}

    def recorded(self, entry: Mapping[str, Any]) -> dict[str, nn.Module]:
        channels = tuple(entry["channels"])
        if len(channels) != len(self.between) or any(
            not 0 < kept <= dense or kept % self._least(place)
            for place, (kept, dense) in enumerate(zip(channels, self.width.channels, strict=False))
        ):
            raise BadInput(
                f"{self.name}: channels {list(channels)[:8]}, which {list(self.width.channels)} can't become; the file "
                "was edited, write the model again"
            )
        width = ConvWidths(channels=channels)
        return {} if width == self.width else self.at_width(width)

    def at_width(self, width: ConvWidths) -> dict[str, nn.Module]:
        """All that has other channels, by name, its weights not yet set."""
        empty: dict[str, nn.Module] = {}
        names = [name for name, part in self.block.row.items() if isinstance(part, Weighted)]
        for name, (part, inputs, outputs) in zip(names, self._sized(width), strict=True):
            if (inputs, outputs) == channels_of(part):
                continue
            empty[f"{self.name}.{name}"] = (
                part.empty(inputs, outputs) if isinstance(part, Convolution) else part.empty(inputs)
            )
        return empty

    def of_layer(self, layer: nn.Module) -> "ConvSite":
        assert isinstance(layer, ConvBlock), layer
        return replace(self, block=layer)
