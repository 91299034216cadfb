"""Channel sites: the two linear layers of an MLP."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from calib.sites import ChannelTaps

from . import cost
from .constant import Constant
from .modules import linear, replaced
from .widths import HeadGeometry, Width


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSite:
    """Hidden channels between two linear layers with an activation, channel by channel, between them.

    `merge`: the module that merges the tokens that come here, None where none are merged.
    """

    kind: ClassVar[str] = "channels"
    name: str
    first: nn.Linear
    last: nn.Linear
    first_name: str
    last_name: str
    merge: nn.Module | None = None

    @property
    def reason(self) -> str:
        return ""

    @property
    def width(self) -> int:
        return self.first.out_features

    @property
    def size(self) -> int:
        return self.width

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.first, self.last

    def size_of(self, width: Width) -> int:
        assert isinstance(width, int), (self.name, width)
        return width

    def taps(self) -> ChannelTaps:
        return ChannelTaps(name=self.name, output=self.last, merge=self.merge)

    def words(self) -> str:
        return f"hidden {self.width}"

    def outline(self, geometry: HeadGeometry) -> str:
        return f"mlp of {self.first.in_features} and {self.width}"

    def macs(self, width: Width, geometry: HeadGeometry, tokens: int) -> int:
        assert isinstance(width, int), (self.name, width)
        return cost.mlp_macs(tokens=tokens, dim=self.first.in_features, hidden=width)

    def parameters(self, width: Width, geometry: HeadGeometry) -> int:
        assert isinstance(width, int), (self.name, width)
        return cost.mlp_parameters(
            dim=self.first.in_features,
            hidden=width,
            input_bias=self.first.bias is not None,
            output_bias=self.last.bias is not None or width != self.width,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "hidden": self.width,
            "input_bias": self.first.bias is not None,
            "output_bias": self.last.bias is not None,
        }

    def as_metadata(self) -> dict[str, int]:
        return {"hidden": self.width}

    def recorded(self, entry: Mapping[str, Any]) -> dict[str, nn.Module]:
        now = self.as_json()
        if {key: entry.get(key, now[key]) for key in now} == now:
            return {}
        input_bias = entry.get("input_bias", now["input_bias"])
        return {**self.empty(entry["hidden"], input_bias=input_bias, output_bias=entry["output_bias"])}

    def empty(self, width: int, *, output_bias: bool, input_bias: bool | None = None) -> dict[str, nn.Linear]:
        """Both layers at another width, the first one first, by module name, their weights not yet set."""
        where: dict[str, Any] = {"device": self.first.weight.device, "dtype": self.first.weight.dtype}
        input_bias = self.first.bias is not None if input_bias is None else input_bias
        first = linear(self.first.in_features, width, bias=input_bias, **where)
        last = linear(width, self.last.out_features, bias=output_bias, **where)
        return {self.first_name: first, self.last_name: last}

    def plain(self) -> dict[str, nn.Module]:
        """The modules that are exported in place of the site's own, by name: a constant where nothing else stays."""
        return {} if self.width else {self.first_name: nn.Identity(), self.last_name: Constant(self.last)}

    def _inside(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")

    def with_first(self, layer: nn.Module, first: nn.Linear) -> nn.Module:
        return replaced(layer, {self._inside(self.first_name): first})

    def of_layer(self, layer: nn.Module) -> "ChannelSite":
        first, last = (layer.get_submodule(self._inside(name)) for name in (self.first_name, self.last_name))
        assert isinstance(first, nn.Linear), (self.first_name, first)
        assert isinstance(last, nn.Linear), (self.last_name, last)
        return replace(self, first=first, last=last)
