"""What every site costs now, counted, and at any other width, by formula."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from corp_deploy.traced.finding.shares import Layers
from corp_deploy.traced.models.sites import Currency, Site

from . import traced_model
from .family import sites_of
from .widths import Width, Widths


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCosts:
    """Costs in one currency. `layers`: what sites, which share them, save together; `biases`: what layers get that have
    none, by name, where a site that they read is narrower.
    """

    currency: Currency
    now: Mapping[str, int]
    layers: Layers
    biases: Mapping[str, int]

    def of(self, site: Site, width: Width) -> int:
        """At another width."""
        return (site.macs_now if self.currency == "macs" else site.parameters_now) * width // site.width

    def saved(self, sites: Iterable[Site], widths: Widths) -> float:
        """By these widths, exactly."""
        found = [site for site in sites if site.name in widths]
        left = {site.groups.key: widths[site.name] / site.size for site in found}
        added = {each.bias for site in found if left[site.groups.key] < 1.0 for each in site.readings}
        return self.layers.saved(left) - sum(self.biases.get(name, 0) for name in added)


def site_costs(model: nn.Module, currency: Currency) -> SiteCosts:
    """The costs of this model's sites, of which its program says what goes with each: never less than it will be."""
    own, every = traced_model.tracing(model), sites_of(model).every
    layers = own.shares.macs if currency == "macs" else own.shares.parameters
    biases = {name: own.program.tensor(name).numel() for name in own.added if currency == "params"}
    free = SiteCosts(currency=currency, now={}, layers=layers, biases=biases)
    return replace(free, now={site.name: free.of(site, site.width) for site in every})
