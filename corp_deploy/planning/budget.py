"""Per-site widths for one budget: error-against-width curves, weighted by what each site does to the logits.

The curve of a site is in its own unit (mean square of the MLP's output, of the logits, of the projection's output). One
probe per curve, without labels, turns all into one currency: the site alone is reduced to about half its width, and
the squared change of the model's logits over the curve's value there is its weight. The knapsack over the aligned
widths is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from calib.moments import ChannelMoments, HeadMoments, Moments
from corp_deploy.algebra import knapsack as allocate
from corp_deploy.algebra import queries_keys as recover_attention
from corp_deploy.algebra import values as recover_values
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.model_cost import macs, parameters
from corp_deploy.families.site_cost import Currency, SiteCosts, site_costs
from corp_deploy.families.widths import HeadWidths, aligned_widths, geometry_of_heads, head_widths
from corp_deploy.reduction import pool as site_pool
from corp_deploy.reduction.channels import elimination
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import site_moments, uniform_widths
from corp_deploy.reduction.site import layers_of
from ground.errors import BadInput

from .probe import Probe, Trial, Width


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One site: the widths it may have, narrowest first, the cost of each and the squared logit error each is worth.

    `cost_now` is the site's cost in the model as it is, which may differ from that of the same widths in new modules.
    """

    site: str
    widths: tuple[Width, ...]
    costs: tuple[int, ...]
    errors: tuple[float, ...]
    cost_now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """Widths by site, the share of the dense cost that stays, and the relative logit error the curves predict."""

    widths: dict[str, Width]
    share: float
    predicted_error: float


def eliminations(model: nn.Module, moments: Moments, method: Method) -> dict[str, Elimination]:
    """Every MLP's order of removal; made once, it serves every width of a sweep or a budget."""

    def at_site(part: vit.ChannelSite) -> Elimination:
        return elimination(site_moments(part.name, moments, ChannelMoments, model), layers_of(part), method)

    mlps = vit.sites(model).mlps
    found = site_pool.each(at_site, mlps, vit.device(model))
    return dict(zip((part.name for part in mlps), found, strict=True))


def _halfway(widths: tuple[int, ...], dense: int) -> int:
    return min(widths[:-1], key=lambda width: abs(2 * width - dense))


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A site's error by width, narrowest first, in its own unit, and the trial that turns it into output error."""

    errors: tuple[float, ...]
    at: int
    trial: Trial

    def in_outputs(self, effects: Mapping[Trial, float]) -> tuple[float, ...]:
        """The curve scaled so that at the width that was tried it is the effect measured there."""
        effect, here = effects[self.trial], self.errors[self.at]
        return tuple(effect * value / here if here > 0.0 else 0.0 for value in self.errors)


def _mlp_curves(part: vit.ChannelSite, probe: Probe) -> list[Curve]:
    widths = aligned_widths(part.hidden, probe.method.align_hidden)
    if len(widths) == 1:
        return []
    half = _halfway(widths, part.hidden)
    errors = tuple(probe.eliminations[part.name].error_at(width) for width in widths)
    return [Curve(errors=errors, at=widths.index(half), trial=(part.name, half))]


def _attention_curves(part: vit.HeadSite, probe: Probe) -> list[Curve]:
    """Q/K where they may shrink, and the values where they do."""
    sizes = aligned_widths(part.size, probe.method.align_head)
    if len(sizes) == 1:
        return []
    moments = site_moments(part.name, probe.moments, HeadMoments, probe.model)
    half = _halfway(sizes, part.size)
    lost: list[tuple[Tensor, HeadWidths]] = []
    if not part.keeps_qk:
        lost_HD = recover_attention.lowrank_spectrum(moments.q_second_HDD, moments.k_centred_HDD)
        lost.append((lost_HD, HeadWidths(qk=half, v=part.v)))
    if part.keeps_qk or probe.method.geometry == "square":
        weight_OC = part.proj.weight.detach().double()
        lost_HD = recover_values.lowrank_spectrum(moments.z_mean_C, moments.z_second_CC, weight_OC, part.heads)
        lost.append((lost_HD, HeadWidths(qk=part.qk, v=half)))
    return [
        Curve(
            errors=tuple(float(lost_HD[:, size].sum()) for size in sizes),
            at=sizes.index(half),
            trial=(part.name, widths),
        )
        for lost_HD, widths in lost
    ]


def _mlp_offer(part: vit.ChannelSite, costs: SiteCosts, probe: Probe, errors: tuple[float, ...]) -> Offer:
    widths = aligned_widths(part.hidden, probe.method.align_hidden)
    prices = tuple(costs.of_mlp(part, width) for width in widths)
    return Offer(site=part.name, widths=widths, costs=prices, errors=errors, cost_now=costs.now[part.name])


def _attention_offer(part: vit.HeadSite, costs: SiteCosts, probe: Probe, errors: tuple[float, ...]) -> Offer:
    sizes, geometry = aligned_widths(part.size, probe.method.align_head), probe.method.geometry
    widths = tuple(head_widths(size, part.widths, geometry, keeps_qk=bool(part.keeps_qk)) for size in sizes)
    prices = tuple(costs.of_attention(part, width, geometry_of_heads(width, geometry)) for width in widths)
    return Offer(site=part.name, widths=widths, costs=prices, errors=errors, cost_now=costs.now[part.name])


def offers(probe: Probe, currency: Currency) -> list[Offer]:
    """Every site's offer: its error curves in output error, added up; one walk of the probe tries them all.

    An attention whose Q/K must stay offers its values. Raises BadInput for a method that has no error curves.
    """
    if probe.method.mlp_selection != "obs" or probe.method.qk_recovery != "lowrank":
        raise BadInput("a budget follows the error curves of preset best (obs and lowrank); expected --preset best")
    costs, found = site_costs(probe.model, currency), vit.sites(probe.model)
    mlps = site_pool.each(lambda part: _mlp_curves(part, probe), found.mlps, vit.device(probe.model))
    attentions = site_pool.each(lambda part: _attention_curves(part, probe), found.attentions, vit.device(probe.model))
    curves = [*mlps, *attentions]
    effects = probe.effects([curve.trial for several in curves for curve in several])
    errors = [
        tuple(map(sum, zip(*(curve.in_outputs(effects) for curve in several), strict=True))) or (0.0,)
        for several in curves
    ]
    offered = dict(zip((part.name for part in found.every), errors, strict=True))
    return [_mlp_offer(part, costs, probe, offered[part.name]) for part in found.mlps] + [
        _attention_offer(part, costs, probe, offered[part.name]) for part in found.attentions
    ]


def dense_cost(model: nn.Module, currency: Currency) -> int:
    """MACs of one image, or parameters, of the whole dense model, counted."""
    return macs(model) if currency == "macs" else parameters(model)


def spend(sites: list[Offer], dense: int, share: float) -> Allocated:
    """The widths of least predicted error that keep at most `share` of the dense cost; exact.

    Raises BadInput when even the narrowest widths cost more.
    """
    fixed = dense - sum(offer.cost_now for offer in sites)
    method = [
        allocate.Choices(
            site=offer.site,
            widths=tuple(range(len(offer.widths))),
            costs=tuple(map(float, offer.costs)),
            errors=offer.errors,
        )
        for offer in sites
    ]
    least = fixed + sum(offer.costs[0] for offer in sites)
    if least > share * dense:
        raise BadInput(
            f"a budget of {share:g} is out of reach: the narrowest widths keep {least / dense:.3f}, of which "
            f"{fixed / dense:.3f} belongs to no site that can be reduced (see inspect); ask for more"
        )
    found = allocate.allocate(method, share * dense - fixed)
    widths = {offer.site: offer.widths[found.widths[offer.site]] for offer in sites}
    return Allocated(widths=widths, share=(found.cost + fixed) / dense, predicted_error=found.error**0.5)


def uniform(model: nn.Module, method: Method, sites: list[Offer], dense: int) -> Allocated:
    """What the method's own uniform sparsities leave and lose, by the offers; a site they don't touch stays whole."""
    fixed = dense - sum(offer.cost_now for offer in sites)
    asked = uniform_widths(model, method)
    widths = {offer.site: asked.get(offer.site, offer.widths[-1]) for offer in sites}
    picks = [(offer, offer.widths.index(widths[offer.site])) for offer in sites]
    cost = fixed + sum(offer.costs[pick] for offer, pick in picks)
    error = sum(offer.errors[pick] for offer, pick in picks) ** 0.5
    return Allocated(widths=widths, share=cost / dense, predicted_error=error)


def uniform_for_share(
    model: nn.Module, method: Method, sites: list[Offer], dense: int, share: float
) -> tuple[float, Allocated] | None:
    """The least uniform sparsity (in percent steps) that meets the same budget, to stand beside allocated widths.

    None where none does: measured costs need not fall with every width.
    """
    for percent in range(100):
        asked = replace(method, mlp_sparsity=percent / 100, attention_sparsity=percent / 100)
        found = uniform(model, asked, sites, dense)
        if found.share <= share:
            return percent / 100, found
    return None
