"""Coupled channels: those of a residual stream, which several convolutions write and several read, all of them kept or
removed together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from calib.sites import ChannelTaps, PatchTaps
from ground.errors import BadInput

from .convolution import Convolution
from .modules import linear
from .squeeze import SqueezeExcite
from .widths import finer_step, stepped_width

Along = Convolution | SqueezeExcite
Reader = Convolution | nn.Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSite:
    """The channels of one stream, by the paths of modules in the model: what writes them, what has weights by channel
    beside or behind (depthwise convolutions, squeezes), and what reads them. `name` is the first writer's.
    """

    name: str
    writers: Mapping[str, Convolution]
    along: Mapping[str, Along]
    readers: Mapping[str, Reader]

    @property
    def width(self) -> int:
        return next(iter(self.writers.values())).out_channels

    def kept(self, share: float, align: int) -> int:
        """Channels that stay of a share kept, to the nearest multiple."""
        return stepped_width(self.width, share, finer_step(self.width, 1, align))

    def squeezes(self) -> dict[str, SqueezeExcite]:
        """By their paths."""
        return {path: each for path, each in self.along.items() if isinstance(each, SqueezeExcite)}

    def listening(self) -> tuple[ChannelTaps | PatchTaps, ...]:
        """To what every reader is given, and to the means that squeezes read."""
        squeezes = (ChannelTaps(name=path, output=each.reduce) for path, each in self.squeezes().items())
        return (*(_tap(path, reader) for path, reader in self.readers.items()), *squeezes)

    def words(self) -> str:
        return f"{self.width} channels, written by {len(self.writers)}, read by {len(self.readers)}"

    def as_json(self) -> dict[str, Any]:
        return {"coupled": self.width}

    def recorded(self, entry: Mapping[str, Any]) -> dict[str, nn.Module]:
        """The modules, by name and without weights yet, that make the stream as wide as `as_json` has written."""
        width = entry["coupled"]
        if not 0 < width <= self.width:
            raise BadInput(
                f"{self.name}: {width} channels of a stream of {self.width}; the file was edited, write the model again"
            )
        return {} if width == self.width else self.at_width(width)

    def at_width(self, width: int) -> dict[str, nn.Module]:
        """All that has other channels, by path, its weights not yet set."""
        empty: dict[str, nn.Module] = {}
        for path, module in (*self.writers.items(), *self.along.items(), *self.readers.items()):
            if isinstance(module, SqueezeExcite):
                empty[path] = module.empty(width)
            elif isinstance(module, nn.Linear):
                empty[path] = self._linear(module, width)
            elif module.is_depthwise:
                empty[path] = module.empty(width, width)
            else:
                inputs = width if path in self.readers else module.in_channels
                outputs = width if path in self.writers else module.out_channels
                empty[path] = module.empty(inputs, outputs)
        return empty

    def _linear(self, module: nn.Linear, width: int) -> nn.Linear:
        where: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
        return linear(width, module.out_features, bias=True, **where)


def _tap(path: str, reader: Reader) -> ChannelTaps | PatchTaps:
    if isinstance(reader, nn.Linear):
        return ChannelTaps(name=path, output=reader)
    return PatchTaps(name=path, output=reader, edges=reader.edges)
