"""The sites of timm's vision transformers, attention by attention, and what they cost as graphs."""

from dataclasses import dataclass

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import count
from corp_deploy.families.family import input_ports, sites_of
from corp_deploy.traced.models.pairs import TracedPairs
from corp_deploy.traced.models.sites import TracedChannels
from corp_deploy.traced.models.values import TracedValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Its queries and keys, and its values."""

    pairs: TracedPairs
    values: TracedValues

    @property
    def name(self) -> str:
        return self.pairs.name.removesuffix(".qk")

    @property
    def heads(self) -> int:
        return len(self.values.groups_HV)

    @property
    def qk(self) -> int:
        """Of a head."""
        return self.pairs.dims

    @property
    def v(self) -> int:
        """Of a head."""
        return self.values.groups_HV.shape[1]

    def widths(self, *, heads: int | None = None, qk: int | None = None, v: int | None = None) -> dict[str, int]:
        """Of both sites, for so many heads of so many dimensions."""
        count = heads or self.heads
        return {self.pairs.name: count * (qk or self.qk), self.values.name: count * (v or self.v)}


def attentions(model: nn.Module) -> list[Attention]:
    """In order."""
    found = sites_of(model).by_name
    pairs = [site for site in found.values() if isinstance(site, TracedPairs)]
    every = list[Attention]()
    for site in pairs:
        values = found[f"{site.name.removesuffix('.qk')}.v"]
        assert isinstance(values, TracedValues), values.name
        every.append(Attention(pairs=site, values=values))
    return every


def first_widths(model: nn.Module) -> dict[str, int]:
    """Of the first block: hidden channels, and dimensions of a head."""
    mlp = next(site for site in sites_of(model).every if isinstance(site, TracedChannels))
    first = attentions(model)[0]
    return {"hidden": mlp.width, "qk": first.qk, "v": first.v}


def graph_macs(model: nn.Module) -> int:
    """Multiply-adds of what is exported of it, the zeros beside padded heads among them."""
    return count(traced_model.exportable(model), input_ports(model)).macs
