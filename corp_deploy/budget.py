"""Per-site widths for one budget: error-against-width curves, weighted by what each site does to the logits.

The curve of a site is in its own unit (mean square of the MLP's output, of the logits, of the projection's output). One
probe per curve, without labels, turns all into one currency: the site alone is reduced to about half its width, and
the squared change of the model's logits over the curve's value there is its weight. The knapsack over the aligned
widths is exact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from calib.moments import AttentionMoments, MlpMoments, Moments

from . import allocate, recover_attention, recover_values, vit
from .choices import Choices, HeadWidths, aligned_widths
from .cost import attention_macs, attention_parameters, macs, mlp_macs, mlp_parameters
from .errors import BadInput
from .obs import Elimination
from .reduce import reduce, site_moments, uniform_widths
from .reduce_mlp import elimination
from .reduce_site import layers_of

Currency = Literal["macs", "params"]
Width = int | HeadWidths


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One site: the widths it may have, narrowest first, the cost of each and the squared logit error each is worth."""

    site: str
    widths: tuple[Width, ...]
    costs: tuple[int, ...]
    errors: tuple[float, ...]


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


def _mlp_offer(part: vit.MlpPart, tokens: int, probe: Probe, currency: Currency) -> Offer:
    widths = aligned_widths(part.hidden, probe.choices.align_hidden)
    dim = part.fc1.in_features
    cost = {
        "macs": lambda width: mlp_macs(tokens=tokens, dim=dim, hidden=width),
        "params": lambda width: mlp_parameters(dim=dim, hidden=width),
    }[currency]
    errors = tuple(probe.eliminations[part.name].error_at(width) for width in widths)
    if len(widths) > 1:
        half = _halfway(widths, part.hidden)
        errors = _in_logits(errors, widths.index(half), probe.effect({part.name: half}))
    return Offer(site=part.name, widths=widths, costs=tuple(map(cost, widths)), errors=errors)


def _attention_cost(
    part: vit.AttentionPart, width: HeadWidths, tokens: int, choices: Choices, currency: Currency
) -> int:
    dim, heads = part.qkv.in_features, part.heads
    if currency == "params":
        return attention_parameters(dim=dim, heads=heads, qk=width.qk, v=width.v)
    padded = choices.geometry == "padded"
    return attention_macs(tokens=tokens, dim=dim, heads=heads, qk=width.qk, v=width.v, padded=padded)


def _attention_curves(part: vit.AttentionPart, probe: Probe, widths: tuple[int, ...]) -> tuple[float, ...]:
    """Q/K and, for square heads, the values, each probed apart and added up."""
    moments = site_moments(part.name, probe.moments, AttentionMoments, probe.model)
    half = _halfway(widths, part.qk)
    at = widths.index(half)
    qk_HD = recover_attention.lowrank_spectrum(moments.q_second_HDD, moments.k_centred_HDD)
    effect = probe.effect({part.name: HeadWidths(qk=half, v=part.v)})
    errors = _in_logits(tuple(float(qk_HD[:, width].sum()) for width in widths), at, effect)
    if probe.choices.geometry != "square":
        return errors
    weight_OC = part.proj.weight.detach().double()
    v_HD = recover_values.lowrank_spectrum(moments.z_mean_C, moments.z_second_CC, weight_OC, part.heads)
    effect = probe.effect({part.name: HeadWidths(qk=part.qk, v=half)})
    values = _in_logits(tuple(float(v_HD[:, width].sum()) for width in widths), at, effect)
    return tuple(one + other for one, other in zip(errors, values, strict=True))


def _attention_offer(part: vit.AttentionPart, tokens: int, probe: Probe, currency: Currency) -> Offer:
    offered = aligned_widths(part.qk, probe.choices.align_head)
    square = probe.choices.geometry == "square"
    widths = tuple(HeadWidths(qk=width, v=width if square else part.v) for width in offered)
    costs = tuple(_attention_cost(part, width, tokens, probe.choices, currency) for width in widths)
    errors = _attention_curves(part, probe, offered) if len(offered) > 1 else (0.0,)
    return Offer(site=part.name, widths=widths, costs=costs, errors=errors)


def offers(probe: Probe, currency: Currency) -> Iterator[Offer]:
    """Every site's offer, one probe pass or two each. Raises BadInput for choices that have no error curves."""
    if probe.choices.mlp_selection != "obs" or probe.choices.qk_recovery != "lowrank":
        raise BadInput("a budget follows the error curves of preset best (obs and lowrank); expected --preset best")
    tokens, found = vit.tokens(probe.model), vit.parts(probe.model)
    for mlp in found.mlps:
        yield _mlp_offer(mlp, tokens, probe, currency)
    for part in found.attentions:
        if not part.keeps_qk:
            yield _attention_offer(part, tokens, probe, currency)


def dense_cost(model: nn.Module, currency: Currency) -> int:
    """MACs of one image, or parameters, of the whole dense model."""
    if currency == "macs":
        return macs(vit.shape(model))
    return sum(parameter.numel() for parameter in model.parameters())


def spend(sites: list[Offer], dense: int, share: float) -> Allocated:
    """The widths of least predicted error that keep at most `share` of the dense cost; exact.

    Raises BadInput when even the narrowest widths cost more.
    """
    fixed = dense - sum(offer.costs[-1] for offer in sites)
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
            f"a budget of {share:g} is out of reach: the narrowest widths keep {least / dense:.3f}; ask for more"
        )
    found = allocate.allocate(choices, share * dense - fixed)
    widths = {offer.site: offer.widths[found.widths[offer.site]] for offer in sites}
    return Allocated(widths=widths, share=(found.cost + fixed) / dense, predicted_error=found.error**0.5)


def uniform_for_share(
    model: nn.Module, choices: Choices, sites: list[Offer], dense: int, share: float
) -> tuple[float, Allocated] | None:
    """The least uniform sparsity (in percent steps) that meets the same budget, to stand beside allocated widths.

    None where none does: measured costs need not fall with every width.
    """
    fixed = dense - sum(offer.costs[-1] for offer in sites)
    for percent in range(100):
        uniform = replace(choices, mlp_sparsity=percent / 100, attention_sparsity=percent / 100)
        asked = uniform_widths(model, uniform)
        widths = {offer.site: asked.get(offer.site, offer.widths[-1]) for offer in sites}
        picks = [(offer, offer.widths.index(widths[offer.site])) for offer in sites]
        cost = fixed + sum(offer.costs[pick] for offer, pick in picks)
        if cost <= share * dense:
            error = sum(offer.errors[pick] for offer, pick in picks) ** 0.5
            return percent / 100, Allocated(widths=widths, share=cost / dense, predicted_error=error)
    return None
