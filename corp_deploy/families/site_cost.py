"""What every site costs now, counted, and at any other width, by formula."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from corp_deploy.traced.finding.shares import Layers

from . import traced_model
from .counting import Counted
from .family import sites_of
from .model_cost import counted
from .modules import parameters
from .site import Currency, Site
from .traced_module import TracedModule
from .traced_site import TracedSite
from .widths import HeadGeometry, Width, Widths, is_empty


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """Costs in one currency; `tokens` are those that leave each site, known from the count. `layers`: what sites of a
    traced model, which share them, save together.
    """

    currency: Currency
    now: Mapping[str, int]
    tokens: Mapping[str, int]
    layers: Layers | None = None

    def of(self, site: Site, width: Width, geometry: HeadGeometry) -> int:
        """At another width; `geometry` is that of heads whose widths differ."""
        if self.currency == "macs":
            return site.macs(width, geometry, self.tokens[site.name])
        return site.parameters(width, geometry)

    def saved(self, sites: Iterable[Site], widths: Widths) -> float:
        """By these widths of a traced model's sites, exactly."""
        assert self.layers is not None, self.currency
        found = (site for site in sites if isinstance(site, TracedSite) and site.name in widths)
        return self.layers.saved({site.groups.key: site.size_of(widths[site.name]) / site.size for site in found})


def _now(site: Site, count: Counted, currency: Currency) -> int:
    return count.within(site.name) if currency == "macs" else parameters(*site.modules)


def _as_shared(model: TracedModule, every: Sequence[Site], currency: Currency) -> SiteCosts:
    """Of sites that were found in a program, which says what goes with each: never less than it will be."""
    shares = traced_model.tracing(model).shares
    layers = shares.macs if currency == "macs" else shares.parameters
    free = SiteCosts(currency=currency, now={}, tokens=dict.fromkeys((site.name for site in every), 0), layers=layers)
    return replace(free, now={site.name: free.of(site, site.width, "ragged") for site in every})


def site_costs(model: nn.Module, currency: Currency) -> SiteCosts:
    """The costs of this model's sites, the formulas held against the count."""
    every = sites_of(model).every
    if isinstance(model, TracedModule):
        return _as_shared(model, every, currency)
    count = counted(model)
    of_module = {id(module): name for name, module in model.named_modules()}
    tokens = dict.fromkeys((site.name for site in every), 0)  # a constant needs none
    for site in every:
        if not is_empty(site.width):
            tokens[site.name] = count.by_module[of_module[id(site.last)]] // site.last.weight.numel()
    now = {site.name: _now(site, count, currency) for site in every}
    costs = SiteCosts(currency=currency, now=now, tokens=tokens)
    for site in every:
        by_formula = costs.of(site, site.width, site.as_json().get("geometry", "ragged"))
        assert by_formula == now[site.name], (site.name, by_formula, now[site.name])
    return costs
