"""Head sites: the heads of one attention layer."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from calib.sites import HeadTaps

from . import cost
from .constant import Constant
from .head_attention import HeadAttention
from .head_taps import taps_of
from .modules import fill_, parameters, replaced
from .sequence_rotary import SequenceRotary
from .widths import HeadGeometry, HeadWidths, Width, geometry_of_heads

Mixing = Literal["free", "planes", "none"]
"""Which dimensions of a head may be mixed with each other before the dot product: all, those of a plane that positions
turn, none."""

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSite:
    """The heads of one attention layer: a fused projection with rows q, k, v, and the output projection.

    `mixing` none: queries and keys must stay as they are, for the `reason`. `norm`: what stands between all heads and
    the output projection, so that values must stay, for the `reason`; None where nothing does. `rotary` and
    `causal`: as HeadAttention's. `merge`: the module that merges the tokens that come here, None where none are merged.
    `grouped` heads in turn share keys and values, which go with them and keep their width. `biasless`: the output
    projection has no bias, and gets none.
    """

    kind: ClassVar[str] = "heads"
    name: str
    module: nn.Module
    first: nn.Linear
    last: nn.Linear
    heads: int
    qk: int
    v: int
    scale: float
    q_norm: nn.Module
    k_norm: nn.Module
    geometry: HeadGeometry
    mixing: Mixing = "free"
    norm: nn.Module | None = None
    rotary: SequenceRotary | None = None
    causal: bool = False
    biasless: bool = False
    grouped: int = 1
    reason: str = ""
    merge: nn.Module | None = None

    @property
    def keeps_qk(self) -> bool:
        """Whether queries and keys must stay, so that a reduction can change the values alone."""
        return self.mixing == "none"

    @property
    def in_planes(self) -> bool:
        """Whether queries and keys may lose whole planes alone, two dimensions each."""
        return self.mixing == "planes"

    def step(self, align: int) -> int:
        """The multiple that the width of queries and keys is rounded to, where this one is asked for."""
        return 2 * align if self.in_planes and align % 2 else align

    @property
    def keeps_v(self) -> bool:
        """Whether values must stay, so that a reduction can change queries and keys alone."""
        return self.norm is not None or self.grouped > 1

    @property
    def keeps_dims(self) -> bool:
        """Whether no dimension of a head can go, whole heads at most."""
        return self.keeps_qk and self.keeps_v

    @property
    def groups(self) -> int:
        """How many keys and values there are."""
        return self.heads // self.grouped

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of the first layer, for queries, keys and values."""
        return self.heads * self.qk, self.groups * self.qk, self.groups * self.v

    @property
    def keeps_heads(self) -> str:
        """Why no head can go whole, or nothing."""
        return "" if self.norm is None else f"a {type(self.norm).__name__} before the output projection mixes all heads"

    @property
    def keeps_heads_apart(self) -> str:
        """Why no heads can be merged, or nothing."""
        turned = self.rotary is not None and len(self.rotary.freqs_HP) > 1
        if turned:
            return "positions turn each head in a way of its own, so that heads can't be merged"
        if self.grouped > 1:
            return "heads share keys and values in groups, so that heads can't be merged"
        return self.keeps_heads

    @property
    def width(self) -> HeadWidths:
        return HeadWidths(qk=self.qk, v=self.v)

    @property
    def size(self) -> int:
        return self.v if self.keeps_qk else self.qk

    def entering(self, tokens: int) -> tuple[int, ...]:
        return tokens, self.first.in_features

    @property
    def firsts(self) -> tuple[nn.Linear, ...]:
        return (self.first,)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def size_of(self, width: Width) -> int:
        assert isinstance(width, HeadWidths), (self.name, width)
        return width.v if self.keeps_qk else width.qk

    def listening(self) -> tuple[HeadTaps, ...]:
        return (self.taps(),)

    def taps(self) -> HeadTaps:
        """See taps_of."""
        return taps_of(self)

    def words(self) -> str:
        return f"{self._heads()}, qk {self.qk}, v {self.v}, {self.geometry}"

    def _heads(self) -> str:
        return f"{self.heads} heads" + (f" in {self.groups} groups" if self.grouped > 1 else "")

    def outline(self, geometry: HeadGeometry) -> str:
        widths = f"{self._heads()} of {self.qk} and {self.v}{', Q/K kept' * self.keeps_qk}{', V kept' * self.keeps_v}"
        more = "" if self.rotary is None else ", rotary"
        return f"attention of {self.first.in_features}, {widths}, {geometry}{more}"

    def macs(self, width: Width, geometry: HeadGeometry, tokens: int) -> int:
        assert isinstance(width, HeadWidths), (self.name, width)
        heads = width.heads or self.heads
        return cost.attention_macs(
            tokens=tokens,
            dim=self.first.in_features,
            heads=heads,
            groups=heads // self.grouped,
            qk=width.qk,
            v=width.v,
            padded=geometry_of_heads(width, geometry) == "padded",
        )

    def parameters(self, width: Width, geometry: HeadGeometry) -> int:
        """Norms stay."""
        assert isinstance(width, HeadWidths), (self.name, width)
        heads = width.heads or self.heads
        stay = (self.q_norm, self.k_norm, self.norm)
        changed = width.v != self.v or heads != self.heads
        return parameters(*(each for each in stay if each is not None)) + cost.attention_parameters(
            dim=self.first.in_features,
            heads=heads,
            groups=heads // self.grouped,
            qk=width.qk,
            v=width.v,
            qkv_bias=self.first.bias is not None,
            proj_bias=self.last.bias is not None or (changed and not self.biasless),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "qk": self.qk,
            "v": self.v,
            "scale": self.scale,
            "geometry": self.geometry,
            "qkv_bias": self.first.bias is not None,
            "proj_bias": self.last.bias is not None,
        }

    def as_metadata(self) -> dict[str, int]:
        return {"heads": self.heads, "qk": self.qk, "v": self.v}

    def recorded(self, entry: Mapping[str, Any]) -> dict[str, nn.Module]:
        now = self.as_json()
        settable = ("heads", "qk", "v", "geometry", "qkv_bias", "proj_bias")
        settings = {key: entry.get(key, now[key]) if key == "qkv_bias" else entry[key] for key in settable}
        return {} if settings == {key: now[key] for key in settable} else {self.name: self.empty(**settings)}

    def empty(
        self,
        *,
        qk: int,
        v: int,
        geometry: HeadGeometry,
        heads: int | None = None,
        qkv_bias: bool | None = None,
        proj_bias: bool | None = None,
        fused: bool = True,
    ) -> HeadAttention:
        """An attention module for this place with other head widths, or fewer heads, its weights not yet set."""
        kept_H = self._first_heads(heads or self.heads)
        with torch.device(self.first.weight.device):
            module = HeadAttention(
                dim=self.first.in_features,
                heads=len(kept_H),
                qk=qk,
                v=v,
                scale=self.scale,
                geometry=geometry,
                qkv_bias=self.first.bias is not None if qkv_bias is None else qkv_bias,
                proj_bias=self.last.bias is not None if proj_bias is None else proj_bias,
                q_norm=copy.deepcopy(self.q_norm),
                k_norm=copy.deepcopy(self.k_norm),
                norm=copy.deepcopy(self.norm),
                rotary=self._rotary(qk, kept_H),
                fused=fused,
                groups=len(kept_H) // self.grouped,
                causal=self.causal,
            )
        return module.to(self.first.weight.dtype)

    def _first_heads(self, count: int) -> Tensor:
        return torch.arange(count, device=self.first.weight.device)

    def _turning(self, kept_H: Tensor) -> SequenceRotary:
        assert self.rotary is not None, self.name
        return copy.deepcopy(self.rotary) if len(kept_H) == self.heads else self.rotary.of_heads(kept_H)

    def _rotary(self, qk: int, kept_H: Tensor) -> SequenceRotary | None:
        """For heads of another width, which planes is not yet known."""
        if self.rotary is None or not qk:
            return None
        rotary = self._turning(kept_H)
        if qk == 2 * rotary.planes:
            return rotary
        first_K = torch.arange(qk // 2, device=self.first.weight.device)
        return rotary.narrowed(first_K.expand(len(kept_H), -1))

    def of_heads(self, kept_H: Tensor, last: Weights) -> "HeadSite":
        """The site with these heads alone, all of a group or none, and an output projection with these weights, which
        reads them.
        """
        module = self.empty(
            qk=self.qk, v=self.v, geometry=self.geometry, heads=len(kept_H), proj_bias=last[1] is not None
        )
        kept_G = kept_H[:: self.grouped] // self.grouped
        counts, kept = (self.heads, self.groups, self.groups), (kept_H, kept_G, kept_G)
        parts = zip(self._row_numbers(), counts, kept, strict=True)
        rows = [part.reshape(count, -1)[own].flatten() for part, count, own in parts]
        own, bias = torch.cat(rows), self.first.bias
        fill_(module.qkv, self.first.weight.detach()[own], None if bias is None else bias.detach()[own])
        fill_(module.proj, *last)
        module.rotary = None if self.rotary is None else self._turning(kept_H)
        return replace(self.of_layer(module.eval()), heads=len(kept_H))

    def _row_numbers(self) -> tuple[Tensor, ...]:
        """Those of the first layer that give queries, keys and values."""
        every: tuple[Tensor, ...] = torch.arange(sum(self.rows), device=self.first.weight.device).split(self.rows)
        return every

    def placed(
        self,
        width: HeadWidths,
        geometry: HeadGeometry,
        first: Weights,
        last: Weights,
        planes_HK: Tensor | None = None,
    ) -> tuple[HeadAttention, nn.Linear]:
        """An attention module of these head widths with these weights, and its output projection; that has a bias where
        it is given one. `planes_HK`: those that each head keeps, where they are turned and fewer.
        """
        module = self.empty(
            qk=width.qk,
            v=width.v,
            geometry=geometry_of_heads(width, geometry),
            heads=width.heads,
            proj_bias=last[1] is not None,
        )
        fill_(module.qkv, *first)
        fill_(module.proj, *last)
        if planes_HK is not None and width.qk != self.qk:
            assert self.rotary is not None, self.name
            module.rotary = self.rotary.narrowed(planes_HK)
        return module, module.proj

    def plain(self, geometry: HeadGeometry | None) -> HeadAttention:
        """The same attention spelled MatMul-Softmax-MatMul, which is the form to export; `geometry` replaces that of
        heads whose q/k and v widths differ.
        """
        chosen = self.geometry if geometry is None or self.qk == self.v else geometry
        module = self.empty(qk=self.qk, v=self.v, geometry=chosen, fused=False)
        module.load_state_dict(self.module.state_dict())
        if not self.v:
            module.proj = Constant(module.proj)  # type: ignore[assignment]
        return module

    @property
    def reorders(self) -> bool:
        """Whether the values of a head can stand in another order."""
        return not self.keeps_v and self.v > 0

    @torch.no_grad()
    def reorder_(self, order_C: Tensor) -> None:
        """Put the values of all heads in another order, in front of the output projection, which has yet to take it."""
        values = self._row_numbers()[2]
        self.first.weight[values] = self.first.weight[values][order_C]
        if self.first.bias is not None:
            self.first.bias[values] = self.first.bias[values][order_C]

    def stacked_first(self) -> nn.Linear:
        return copy.deepcopy(self.first)

    def with_first(self, layer: nn.Module, first: nn.Linear) -> nn.Module:
        return replaced(layer, {"qkv": first})

    def of_layer(self, layer: nn.Module) -> "HeadSite":
        """The site of a layer whose modules go by HeadAttention's names, in all else as this one."""
        qkv, proj = layer.get_submodule("qkv"), layer.get_submodule("proj")
        assert isinstance(qkv, nn.Linear), (self.name, qkv)
        assert isinstance(proj, nn.Linear), (self.name, proj)
        rotary = None if self.rotary is None else layer.get_submodule("rotary")
        assert rotary is None or isinstance(rotary, SequenceRotary), (self.name, rotary)
        return replace(
            self,
            module=layer,
            first=qkv,
            last=proj,
            q_norm=layer.get_submodule("q_norm"),
            k_norm=layer.get_submodule("k_norm"),
            norm=None if self.norm is None else layer.get_submodule("norm"),
            rotary=rotary,
        )
