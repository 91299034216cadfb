"""Per-site widths for one budget: error-against-width curves, weighted by what each site does to the logits.

The curve of a site is in its own unit (mean square of the MLP's output, of the logits, of the projection's output). One
probe per curve, without labels, turns all into one currency: the site alone is reduced to about half its width, and
the squared change of the model's logits over the curve's value there is its weight. The knapsack over the aligned
widths is exact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from calib.moments import AttentionMoments, MlpMoments, Moments

from . import allocate, recover_attention, recover_values, vit
from .choices import Choices, HeadWidths, aligned_widths, geometry_of_heads, head_widths
from .errors import BadInput
from .model_cost import macs, parameters
from .obs import Elimination
from .reduce import reduce, site_moments, uniform_widths
from .reduce_mlp import elimination
from .reduce_site import layers_of
from .site_cost import Currency, SiteCosts, site_costs

Width = int | HeadWidths


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


def eliminations(model: nn.Module, moments: Moments, choices: Choices) -> dict[str, Elimination]:
    """Every MLP's order of removal; made once, it serves every width of a sweep or a budget."""
    return {
        part.name: elimination(site_moments(part.name, moments, MlpMoments, model), layers_of(part), choices)
        for part in vit.parts(model).mlps
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the logits of a few images change by when one site alone is reduced."""

    model: nn.Module
    moments: Moments
    choices: Choices
    images: Tensor
    eliminations: Mapping[str, Elimination]

    def effect(self, widths: Mapping[str, Width]) -> float:
        """Squared relative change of the logits when these sites have these widths and the others stay."""
        alone = replace(self.choices, geometry="ragged")  # exact at any widths, and only the values count here
        reduced = reduce(self.model, self.moments, alone, widths=widths, eliminations=self.eliminations).model
        with torch.inference_mode():
            dense = self.model(self.images).double()
            return float((reduced(self.images) - dense).square().sum() / dense.square().sum())


def _halfway(widths: tuple[int, ...], dense: int) -> int:
    return min(widths[:-1], key=lambda width: abs(2 * width - dense))


def _in_logits(curve: tuple[float, ...], at: int, effect: float) -> tuple[float, ...]:
    """The curve scaled so that its value at index `at` is the effect measured there."""
    return tuple(effect * value / curve[at] if curve[at] > 0.0 else 0.0 for value in curve)


def _mlp_offer(part: vit.MlpPart, costs: SiteCosts, probe: Probe) -> Offer:
    widths = aligned_widths(part.hidden, probe.choices.align_hidden)
    errors = tuple(probe.eliminations[part.name].error_at(width) for width in widths)
    if len(widths) > 1:
        half = _halfway(widths, part.hidden)
        errors = _in_logits(errors, widths.index(half), probe.effect({part.name: half}))
    prices = tuple(costs.of_mlp(part, width) for width in widths)
    return Offer(site=part.name, widths=widths, costs=prices, errors=errors, cost_now=costs.now[part.name])


def _attention_curves(part: vit.AttentionPart, probe: Probe, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """Q/K where they may shrink and the values where they do, each probed apart and added up."""
    moments = site_moments(part.name, probe.moments, AttentionMoments, probe.model)
    half = _halfway(sizes, part.size)
    curves = []
    if not part.keeps_qk:
        lost_HD = recover_attention.lowrank_spectrum(moments.q_second_HDD, moments.k_centred_HDD)
        curves.append((lost_HD, HeadWidths(qk=half, v=part.v)))
    if part.keeps_qk or probe.choices.geometry == "square":
        weight_OC = part.proj.weight.detach().double()
        lost_HD = recover_values.lowrank_spectrum(moments.z_mean_C, moments.z_second_CC, weight_OC, part.heads)
        curves.append((lost_HD, HeadWidths(qk=part.qk, v=half)))
    scaled = [
        _in_logits(
            tuple(float(lost_HD[:, size].sum()) for size in sizes),
            sizes.index(half),
            probe.effect({part.name: alone}),
        )
        for lost_HD, alone in curves
    ]
    return tuple(map(sum, zip(*scaled, strict=True)))


def _attention_offer(part: vit.AttentionPart, costs: SiteCosts, probe: Probe) -> Offer:
    sizes, geometry = aligned_widths(part.size, probe.choices.align_head), probe.choices.geometry
    widths = tuple(head_widths(size, part.widths, geometry, keeps_qk=bool(part.keeps_qk)) for size in sizes)
    prices = tuple(costs.of_attention(part, width, geometry_of_heads(width, geometry)) for width in widths)
    errors = _attention_curves(part, probe, sizes) if len(sizes) > 1 else (0.0,)
    return Offer(site=part.name, widths=widths, costs=prices, errors=errors, cost_now=costs.now[part.name])


def offers(probe: Probe, currency: Currency) -> Iterator[Offer]:
    """Every site's offer, one probe pass or two each; an attention whose Q/K must stay offers its values.

    Raises BadInput for choices that have no error curves.
    """
    if probe.choices.mlp_selection != "obs" or probe.choices.qk_recovery != "lowrank":
        raise BadInput("a budget follows the error curves of preset best (obs and lowrank); expected --preset best")
    costs, found = site_costs(probe.model, currency), vit.parts(probe.model)
    for mlp in found.mlps:
        yield _mlp_offer(mlp, costs, probe)
    for part in found.attentions:
        yield _attention_offer(part, costs, probe)


def dense_cost(model: nn.Module, currency: Currency) -> int:
    """MACs of one image, or parameters, of the whole dense model, counted."""
    return macs(model) if currency == "macs" else parameters(model)


def spend(sites: list[Offer], dense: int, share: float) -> Allocated:
    """The widths of least predicted error that keep at most `share` of the dense cost; exact.

    Raises BadInput when even the narrowest widths cost more.
    """
    fixed = dense - sum(offer.cost_now for offer in sites)
    choices = [
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
    found = allocate.allocate(choices, share * dense - fixed)
    widths = {offer.site: offer.widths[found.widths[offer.site]] for offer in sites}
    return Allocated(widths=widths, share=(found.cost + fixed) / dense, predicted_error=found.error**0.5)


def uniform(model: nn.Module, choices: Choices, sites: list[Offer], dense: int) -> Allocated:
    """What the choices' own uniform sparsities leave and lose, by the offers; a site they don't touch stays whole."""
    fixed = dense - sum(offer.cost_now for offer in sites)
    asked = uniform_widths(model, choices)
    widths = {offer.site: asked.get(offer.site, offer.widths[-1]) for offer in sites}
    picks = [(offer, offer.widths.index(widths[offer.site])) for offer in sites]
    cost = fixed + sum(offer.costs[pick] for offer, pick in picks)
    error = sum(offer.errors[pick] for offer, pick in picks) ** 0.5
    return Allocated(widths=widths, share=cost / dense, predicted_error=error)


def uniform_for_share(
    model: nn.Module, choices: Choices, sites: list[Offer], dense: int, share: float
) -> tuple[float, Allocated] | None:
    """The least uniform sparsity (in percent steps) that meets the same budget, to stand beside allocated widths.

    None where none does: measured costs need not fall with every width.
    """
    for percent in range(100):
        asked = replace(choices, mlp_sparsity=percent / 100, attention_sparsity=percent / 100)
        found = uniform(model, asked, sites, dense)
        if found.share <= share:
            return percent / 100, found
    return None
