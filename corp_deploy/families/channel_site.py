"""Channel sites: the linear layers of an MLP, plain or gated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from calib.sites import ChannelTaps

from . import cost
from .constant import Constant
from .modules import fill_rows_, linear, replaced, stacked
from .widths import HeadGeometry, Width


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSite:
    """Hidden channels between linear layers, with what works channel by channel between them.

    Of a plain MLP a channel is one row of `first`. A gated one (SwiGLU and its like, arXiv 2002.05202) multiplies two
    rows, one of them through the activation: both in `first`, a half each (`packed`), or one there and one in `up`.
    `merge`: the module that merges the tokens that come here, None where none are merged. `biasless`: the last layer
    has no bias, and gets none. `multiple`: what widths are best a multiple of, where nobody says.
    """

    kind: ClassVar[str] = "channels"
    name: str
    first: nn.Linear
    last: nn.Linear
    first_name: str
    last_name: str
    packed: bool = False
    up: nn.Linear | None = None
    up_name: str = ""
    merge: nn.Module | None = None
    biasless: bool = False
    multiple: int = 1

    def __post_init__(self) -> None:
        assert not self.packed or (self.up is None and self.first.out_features % 2 == 0), self.name
        alike = self.up is None or (
            self.up.weight.shape == self.first.weight.shape and (self.up.bias is None) == (self.first.bias is None)
        )
        assert alike, (self.name, self.first, self.up)

    @property
    def reason(self) -> str:
        return ""

    @property
    def gated(self) -> bool:
        """Whether a channel is the product of two rows."""
        return self.packed or self.up is not None

    @property
    def rows(self) -> int:
        """Of the first layers, that make a channel."""
        return 2 if self.gated else 1

    @property
    def width(self) -> int:
        return self.first.out_features // 2 if self.packed else self.first.out_features

    @property
    def firsts(self) -> tuple[nn.Linear, ...]:
        return (self.first,) if self.up is None else (self.first, self.up)

    @property
    def size(self) -> int:
        return self.width

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return *self.firsts, self.last

    def entering(self, tokens: int) -> tuple[int, ...]:
        return tokens, self.first.in_features

    def size_of(self, width: Width) -> int:
        assert isinstance(width, int), (self.name, width)
        return width

    def taps(self) -> ChannelTaps:
        return ChannelTaps(name=self.name, output=self.last, merge=self.merge)

    def listening(self) -> tuple[ChannelTaps, ...]:
        return (self.taps(),)

    def words(self) -> str:
        return f"hidden {self.width}"

    def outline(self, geometry: HeadGeometry) -> str:
        return f"{'gated ' * self.gated}mlp of {self.first.in_features} and {self.width}"

    def macs(self, width: Width, geometry: HeadGeometry, tokens: int) -> int:
        assert isinstance(width, int), (self.name, width)
        return cost.mlp_macs(tokens=tokens, dim=self.first.in_features, hidden=width, rows=self.rows)

    def parameters(self, width: Width, geometry: HeadGeometry) -> int:
        assert isinstance(width, int), (self.name, width)
        return cost.mlp_parameters(
            dim=self.first.in_features,
            hidden=width,
            input_bias=self.first.bias is not None,
            output_bias=self.last.bias is not None or (width != self.width and not self.biasless),
            rows=self.rows,
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
        """All linear layers at another width, the last one last, by module name, their weights not yet set."""
        where: dict[str, Any] = {"device": self.first.weight.device, "dtype": self.first.weight.dtype}
        input_bias = self.first.bias is not None if input_bias is None else input_bias
        rows = 2 * width if self.packed else width
        names = (self.first_name,) if self.up is None else (self.first_name, self.up_name)
        firsts = {name: linear(self.first.in_features, rows, bias=input_bias, **where) for name in names}
        return firsts | {self.last_name: linear(width, self.last.out_features, bias=output_bias, **where)}

    def plain(self) -> dict[str, nn.Module]:
        """The modules that are exported in place of the site's own, by name: a constant where nothing else stays."""
        if self.width:
            return {}
        if self.gated:
            return {self.name: Constant(self.last)}
        return {self.first_name: nn.Identity(), self.last_name: Constant(self.last)}

    @property
    def reorders(self) -> bool:
        """Whether channels can stand in another order."""
        return self.width > 0

    @torch.no_grad()
    def reorder_(self, order_F: Tensor) -> None:
        """Put the channels in another order, in front of the last layer, which has yet to take it."""
        rows_X = torch.cat((order_F, order_F + self.width)) if self.packed else order_F
        for layer in self.firsts:
            layer.weight.copy_(layer.weight[rows_X])
            if layer.bias is not None:
                layer.bias.copy_(layer.bias[rows_X])

    def _inside(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")

    def stacked_first(self) -> nn.Linear:
        return stacked(self.firsts)

    def with_first(self, layer: nn.Module, first: nn.Linear) -> nn.Module:
        if self.up is None:
            return replaced(layer, {self._inside(self.first_name): first})
        modules = self.empty(self.width, output_bias=self.last.bias is not None)
        fill_rows_([modules[self.first_name], modules[self.up_name]], first.weight, first.bias)
        names = (self.first_name, self.up_name)
        return replaced(layer, {self._inside(name): modules[name] for name in names})

    def of_layer(self, layer: nn.Module) -> "ChannelSite":
        first, last = (self._linear(layer, name) for name in (self.first_name, self.last_name))
        up = None if self.up is None else self._linear(layer, self.up_name)
        return replace(self, first=first, last=last, up=up)

    def _linear(self, layer: nn.Module, name: str) -> nn.Linear:
        module = layer.get_submodule(self._inside(name))
        assert isinstance(module, nn.Linear), (name, module)
        return module
