"""Head sites: the heads of one attention layer."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from calib.sites import HeadTaps, Tap

from . import cost
from .constant import Constant
from .head_attention import HeadAttention
from .modules import fill_, parameters, replaced
from .widths import HeadGeometry, HeadWidths, Width, geometry_of_heads

Mixing = Literal["free", "none"]
"""Whether the dimensions of a head may be mixed with each other before the dot product."""

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""


def _identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSite:
    """The heads of one attention layer: a fused projection with rows q, k, v, and the output projection.

    `mixing` none: queries and keys must stay as they are, for the `reason`. `norm`: what stands between all heads and
    the output projection, so that values must stay, for the `reason`; None where nothing does. `merge`: the module that
    merges the tokens that come here, None where none are merged.
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
    reason: str = ""
    merge: nn.Module | None = None

    @property
    def keeps_qk(self) -> bool:
        """Whether queries and keys must stay, so that a reduction can change the values alone."""
        return self.mixing == "none"

    @property
    def keeps_v(self) -> bool:
        """Whether values must stay, so that a reduction can change queries and keys alone."""
        return self.norm is not None

    @property
    def width(self) -> HeadWidths:
        return HeadWidths(qk=self.qk, v=self.v)

    @property
    def size(self) -> int:
        return self.v if self.keeps_qk else self.qk

    @property
    def firsts(self) -> tuple[nn.Linear, ...]:
        return (self.first,)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def size_of(self, width: Width) -> int:
        assert isinstance(width, HeadWidths), (self.name, width)
        return width.v if self.keeps_qk else width.qk

    def _head_slice(self, start: int) -> Callable[[Tensor], Tensor]:
        """Take rows start .. start + heads * qk of the qkv output as [B,H,N,qk]."""

        def take(qkv_BNX: Tensor) -> Tensor:
            rows_BNR = qkv_BNX[..., start : start + self.heads * self.qk]
            return rows_BNR.reshape(*rows_BNR.shape[:2], self.heads, self.qk).transpose(1, 2)

        return take

    def taps(self) -> HeadTaps:
        """q and k as they enter the dot product, and the input of the output projection."""
        if self.keeps_qk:
            queries, keys = Tap(module=self.q_norm, take=_identity), Tap(module=self.k_norm, take=_identity)
        else:
            queries = Tap(module=self.first, take=self._head_slice(0))
            keys = Tap(module=self.first, take=self._head_slice(self.heads * self.qk))
        return HeadTaps(name=self.name, queries=queries, keys=keys, output=self.last, merge=self.merge)

    def words(self) -> str:
        return f"{self.heads} heads, qk {self.qk}, v {self.v}, {self.geometry}"

    def outline(self, geometry: HeadGeometry) -> str:
        widths = (
            f"{self.heads} heads of {self.qk} and {self.v}{', Q/K kept' * self.keeps_qk}{', V kept' * self.keeps_v}"
        )
        return f"attention of {self.first.in_features}, {widths}, {geometry}"

    def macs(self, width: Width, geometry: HeadGeometry, tokens: int) -> int:
        assert isinstance(width, HeadWidths), (self.name, width)
        return cost.attention_macs(
            tokens=tokens,
            dim=self.first.in_features,
            heads=self.heads,
            qk=width.qk,
            v=width.v,
            padded=geometry_of_heads(width, geometry) == "padded",
        )

    def parameters(self, width: Width, geometry: HeadGeometry) -> int:
        """Norms stay."""
        assert isinstance(width, HeadWidths), (self.name, width)
        norms = (self.q_norm, self.k_norm) if self.norm is None else (self.q_norm, self.k_norm, self.norm)
        return parameters(*norms) + cost.attention_parameters(
            dim=self.first.in_features,
            heads=self.heads,
            qk=width.qk,
            v=width.v,
            qkv_bias=self.first.bias is not None,
            proj_bias=self.last.bias is not None or width.v != self.v,
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
        settable = ("qk", "v", "geometry", "qkv_bias", "proj_bias")
        settings = {key: entry.get(key, now[key]) if key == "qkv_bias" else entry[key] for key in settable}
        return {} if settings == {key: now[key] for key in settable} else {self.name: self.empty(**settings)}

    def empty(
        self,
        *,
        qk: int,
        v: int,
        geometry: HeadGeometry,
        qkv_bias: bool | None = None,
        proj_bias: bool | None = None,
        fused: bool = True,
    ) -> HeadAttention:
        """An attention module for this place with other head widths, its weights not yet set."""
        with torch.device(self.first.weight.device):
            module = HeadAttention(
                dim=self.first.in_features,
                heads=self.heads,
                qk=qk,
                v=v,
                scale=self.scale,
                geometry=geometry,
                qkv_bias=self.first.bias is not None if qkv_bias is None else qkv_bias,
                proj_bias=self.last.bias is not None if proj_bias is None else proj_bias,
                q_norm=copy.deepcopy(self.q_norm),
                k_norm=copy.deepcopy(self.k_norm),
                norm=copy.deepcopy(self.norm),
                fused=fused,
            )
        return module.to(self.first.weight.dtype)

    def placed(
        self, width: HeadWidths, geometry: HeadGeometry, first: Weights, last: Weights
    ) -> tuple[HeadAttention, nn.Linear]:
        """An attention module of these head widths with these weights, and its output projection; that has a bias where
        it is given one.
        """
        module = self.empty(
            qk=width.qk, v=width.v, geometry=geometry_of_heads(width, geometry), proj_bias=last[1] is not None
        )
        fill_(module.qkv, *first)
        fill_(module.proj, *last)
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

    def stacked_first(self) -> nn.Linear:
        return copy.deepcopy(self.first)

    def with_first(self, layer: nn.Module, first: nn.Linear) -> nn.Module:
        return replaced(layer, {"qkv": first})

    def of_layer(self, layer: nn.Module) -> "HeadSite":
        return head_site(self.name, layer, self)


def head_site(name: str, layer: nn.Module, like: HeadSite) -> HeadSite:
    """A site in a layer whose modules go by HeadAttention's names, in all else like another."""
    qkv, proj = layer.get_submodule("qkv"), layer.get_submodule("proj")
    assert isinstance(qkv, nn.Linear), (name, qkv)
    assert isinstance(proj, nn.Linear), (name, proj)
    return HeadSite(
        name=name,
        module=layer,
        first=qkv,
        last=proj,
        heads=like.heads,
        qk=like.qk,
        v=like.v,
        scale=like.scale,
        q_norm=layer.get_submodule("q_norm"),
        k_norm=layer.get_submodule("k_norm"),
        geometry=like.geometry,
        mixing=like.mixing,
        norm=None if like.norm is None else layer.get_submodule("norm"),
        reason=like.reason,
        merge=like.merge,
    )
