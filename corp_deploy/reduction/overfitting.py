"""An estimate of whether more images would pay: the loss of fits to half of them on their own half and on the other.

After calibration the fits are those of a few MLPs, reduced to half their width for the estimate alone; after a
reduction they are those of its own sites.

A fit of K weights per output to n independent tokens errs by J (1 - K/n) on those and by J (1 + K/n) on others, where J
is the error with endless images. Tokens of one photograph are alike, so n is less than their number. It follows from
the gap between both errors, which falls as 1 / n with the number of photographs.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import nn

from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.sites import Site

from .kinds import kind_of
from .method import Method
from .moments import site_moments, splits_at
from .report import SiteReport

LOOKED_AT = 6  # sites, evenly spaced: a solve of half a hidden layer for each half
WITHIN = 0.1
_METHOD = Method(mlp_selection="combined", mlp_recovery="affine", qk_recovery="keep", mlp_sparsity=0.5, align_hidden=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overfitting:
    """The mean share of the sites' output that is lost on the images of the fit and on others, for fits to all images.

    `tokens_effective`: the number n of independent tokens that the images are worth. `more_groups`: the number of
    further groups that brings both shares within a tenth of each other. Both are None if fits lose no more on others.
    """

    groups: int
    share_fitted: float
    share_held_out: float
    tokens_effective: float | None
    more_groups: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self, lead: str) -> str:
        """Return a sentence that begins with `lead`, on both losses and whether more images would help."""
        lost = (
            f"{lead} {self.share_fitted:.1%} of their output on these {self.groups} groups of images and "
            f"{self.share_held_out:.1%} on others"
        )
        if self.more_groups is None:
            return f"{lost}: no over-fitting shows"
        if self.more_groups == 0:
            return f"{lost}: more images would gain little"
        return f"{lost}; about {self.more_groups:,} more groups would bring the two within 10 % of each other"


def estimate_from_splits(fitted: float, held_out: float, *, groups: int, weights: float) -> Overfitting:
    """Estimate the over-fitting of fits to all groups from that of fits to half of them, with `weights` per output."""
    limit, gap = 0.5 * (fitted + held_out), held_out - fitted
    is_bounded = gap > 0.0 and limit > 0.0
    # gap(M) = gap * (groups / 2) / M, to be at most WITHIN * (limit - gap(M) / 2)
    enough = gap * groups * (0.5 + 0.25 * WITHIN) / (WITHIN * limit) if is_bounded else 0.0
    return Overfitting(
        groups=groups,
        share_fitted=limit - 0.25 * gap,
        share_held_out=limit + 0.25 * gap,
        tokens_effective=4.0 * limit * weights / gap if is_bounded else None,
        more_groups=max(0, round(enough - groups)) if is_bounded else None,
    )


def estimate_overfitting(model: nn.Module, moments: Moments) -> Overfitting | None:
    """Estimate the over-fitting of a few MLPs reduced to half; None for moments without groups or without MLPs."""
    mlps = (site for site in sites_of(model).every if kind_of(site).sparsity(_METHOD))
    held = [site for site in mlps if all(each.name in moments.sites for each in site.listening())]
    # The method keeps about half of their channels.
    every = [(site, width) for site in held if (width := kind_of(site).uniform(site, _METHOD))]
    if moments.half is None or not every:
        return None
    sites, groups = every[:: max(1, len(every) // LOOKED_AT)], len(moments.group_ids.unique())
    where, weights = device_of(model), fmean(width for _, width in sites)
    fitted, held_out = zip(*(_shares_lost(site, moments, width, where) for site, width in sites), strict=True)
    return estimate_from_splits(fmean(fitted), fmean(held_out), groups=groups, weights=weights)


def data_gap(reports: Iterable[SiteReport], moments: Moments) -> Overfitting | None:
    """Estimate the over-fitting of the sites whose ridges were chosen by halves of the images; None without any."""
    fits = [(report.ridge_fit, report.width) for report in reports if report.ridge_fit is not None]
    if not fits:
        return None
    return estimate_from_splits(
        fmean(fit.share_fitted for fit, _ in fits),
        fmean(fit.share_held_out for fit, _ in fits),
        groups=len(moments.group_ids.unique()),
        weights=fmean(width for _, width in fits),
    )


def _shares_lost(site: Site, moments: Moments, width: int, where: torch.device) -> tuple[float, float]:
    """Return the lost share of a site's output, for fits to half of the images, on that half and on the other."""
    own, kind = site_moments(site, moments, where), kind_of(site)
    splits = splits_at(site, moments, own, where)
    assert splits is not None, site.name
    chosen, shares = kind.chosen(site, own, _METHOD, width), list[tuple[float, float]]()
    for half, other in (splits, splits[::-1]):
        (report,) = kind.reduced(site, half, _METHOD, width, cached=chosen, held_out=other).reports
        assert report.held_out is not None, site.name
        shares.append((report.error / report.energy, report.held_out.error / report.held_out.energy))
    return fmean(fitted for fitted, _ in shares), fmean(held_out for _, held_out in shares)
