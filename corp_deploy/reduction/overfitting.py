"""Whether more images would pay: what a fit to half of them loses on its own images, and on the other half.

A fit of K weights an output to n independent tokens errs by J (1 - K/n) on those and by J (1 + K/n) on others, where J
is the error of endless images. Tokens of one photograph are alike, so n is not their number: the gap itself tells it,
and falls with the number of photographs.
"""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from calib.moments import ChannelMoments, Moments
from corp_deploy.algebra.ridges import tried
from corp_deploy.families.channel_site import ChannelSite
from corp_deploy.families.family import sites_of
from corp_deploy.families.modules import device

from .channel_modules import layers_of
from .channels import kept_channels, recovered, share_lost
from .method import DEFAULT_RIDGE_REL, Method
from .moments import halves_at, site_moments

LOOKED_AT = 6  # sites, evenly spaced: a solve of half a hidden layer for each half
WITHIN = 0.1
_METHOD = Method(mlp_selection="combined", mlp_recovery="affine", qk_recovery="keep", mlp_sparsity=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """Of MLPs with half of their channels, on average: the share of the output lost on the images of the fit and on
    others, as fits to all images would have it; independent tokens that the images are worth; and how many more groups
    bring the latter share within a tenth of the former, None where the gap says nothing.
    """

    groups: int
    share_fitted: float
    share_held_out: float
    tokens_effective: float | None
    more_groups: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_halves(fitted: float, held_out: float, *, groups: int, weights: float) -> Overfitting:
    """From what fits to half of the groups lose, of so many weights an output."""
    limit, gap = 0.5 * (fitted + held_out), held_out - fitted
    known = gap > 0.0 and limit > 0.0
    # gap(M) = gap * (groups / 2) / M, to be at most WITHIN * (limit - gap(M) / 2)
    enough = gap * groups * (0.5 + 0.25 * WITHIN) / (WITHIN * limit) if known else 0.0
    return Overfitting(
        groups=groups,
        share_fitted=limit - 0.25 * gap,
        share_held_out=limit + 0.25 * gap,
        tokens_effective=4.0 * limit * weights / gap if known else None,
        more_groups=max(0, round(enough - groups)) if known else None,
    )


def overfitting(model: nn.Module, moments: Moments) -> Overfitting | None:
    """Judged at some MLPs; None for moments that know no groups, or hold no MLPs."""
    every = [site for site in sites_of(model).channels if site.name in moments.sites]
    if moments.half is None or not every:
        return None
    sites = every[:: max(1, len(every) // LOOKED_AT)]
    fitted = held_out = weights = 0.0
    for site in sites:
        width = max(1, site.width // 2)
        of_half = _at(site, moments, width)
        fitted, held_out = fitted + of_half[0] / len(sites), held_out + of_half[1] / len(sites)
        weights += width / len(sites)
    return from_halves(fitted, held_out, groups=len(moments.group_ids.unique()), weights=weights)


def _at(site: ChannelSite, moments: Moments, width: int) -> tuple[float, float]:
    where = device(site.last)
    own = site_moments(site, moments, where)
    assert isinstance(own, ChannelMoments), site.name
    halves = halves_at(site, moments, own, where)
    assert halves is not None, site.name
    layers = layers_of(site)
    kept_K = kept_channels(own, layers, _METHOD, width)
    at = tried(
        halves,
        DEFAULT_RIDGE_REL,
        lambda half, strength: recovered(half, layers, _METHOD, kept_K, strength),
        lambda recovery, half: share_lost(recovery, kept_K, layers, half),
    )
    return at.error_fitted, at.error_held_out
