"""What every site costs now, counted, and at any other width, by formula."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from . import timm_vit as vit
from .cost import attention_macs, attention_parameters, mlp_macs, mlp_parameters
from .counting import Counted
from .model_cost import counted, parameters
from .widths import HeadGeometry, HeadWidths

Currency = Literal["macs", "params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """Costs in one currency; `tokens` are those that pass through each site, known from the count."""

    currency: Currency
    now: Mapping[str, int]
    tokens: Mapping[str, int]

    def of_mlp(self, part: vit.ChannelSite, hidden: int) -> int:
        """At another width, where the repair may need an output bias that the dense layer lacks."""
        dim = part.fc1.in_features
        if self.currency == "macs":
            return mlp_macs(tokens=self.tokens[part.name], dim=dim, hidden=hidden)
        output_bias = part.fc2.bias is not None or hidden != part.hidden
        input_bias = part.fc1.bias is not None
        return mlp_parameters(dim=dim, hidden=hidden, input_bias=input_bias, output_bias=output_bias)

    def of_attention(self, part: vit.HeadSite, widths: HeadWidths, geometry: HeadGeometry) -> int:
        """At other head widths, likewise; norms of queries and keys stay."""
        dim, heads, qk, v = part.qkv.in_features, part.heads, widths.qk, widths.v
        if self.currency == "macs":
            padded = geometry == "padded"
            return attention_macs(tokens=self.tokens[part.name], dim=dim, heads=heads, qk=qk, v=v, padded=padded)
        return parameters(part.q_norm, part.k_norm) + attention_parameters(
            dim=dim,
            heads=heads,
            qk=qk,
            v=v,
            qkv_bias=part.qkv.bias is not None,
            proj_bias=part.proj.bias is not None or v != part.v,
        )


def _now(part: vit.ChannelSite | vit.HeadSite, count: Counted, currency: Currency) -> int:
    if currency == "macs":
        return count.within(part.name)
    return parameters(part.fc1, part.fc2) if isinstance(part, vit.ChannelSite) else parameters(part.module)


def site_costs(model: nn.Module, currency: Currency) -> SiteCosts:
    """The costs of this model's sites, the formulas held against the count."""
    every, count = vit.sites(model).every, counted(model)
    tokens = {
        part.name: count.by_module[f"{part.name}.{vit.first_name(part)}"] // part.first.weight.numel() for part in every
    }
    now = {part.name: _now(part, count, currency) for part in every}
    costs = SiteCosts(currency=currency, now=now, tokens=tokens)
    for part in every:
        if isinstance(part, vit.ChannelSite):
            found = costs.of_mlp(part, part.hidden)
        else:
            found = costs.of_attention(part, part.widths, part.geometry)
        assert found == now[part.name], (part.name, found, now[part.name])
    return costs
