"""Reduce: (model, moments, method) -> a new, smaller, ordinary model and the loss at every site.

Selections and recoveries return what to do; this file does it, once, on a new program. The argument is never edited.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.family import sites_of
from corp_deploy.spec.widths import Widths
from corp_deploy.traced.models.module import device_of, replace_submodules
from corp_deploy.traced.models.narrowed_model import narrow_model, prove_kept
from corp_deploy.traced.models.sites import Site, Sites
from ground.effort import Stopwatch, measure_effort

from . import pool
from .change import TracedReduced, changed_tensors, groups_left
from .coverage import Coverage, coverage
from .fold_inputs import merge_sites
from .kinds import kind_of
from .method import Method
from .moments import require_disjoint, require_same_model, site_moments, splits_at, without_held_out
from .overfitting import Overfitting
from .report import SiteReport, as_allocated
from .rescaling import RESCALING_NOTE, require_rescalable, rescaled_tensors
from .sparse_places import SparsityReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduced model with the report of every site, the coverage of the requested sites, and notes on the others.

    `decisions`: a sentence on each decision. `polish`: the report of a polish as plain JSON values, None without one.
    `sparsity`: the report on weights set to zero after that. `gap`: the sites' loss on images that they are not fitted
    to, estimated where calibration recorded groups of images.
    """

    model: nn.Module
    method: Method
    sites: tuple[SiteReport, ...]
    coverage: Coverage
    notes: tuple[str, ...]
    decisions: tuple[str, ...] = ()
    polish: Mapping[str, Any] | None = None
    sparsity: SparsityReport | None = None
    gap: Overfitting | None = None

    def as_json(self) -> dict[str, Any]:
        """Return choices, sites, coverage and notes as plain JSON values."""
        return {
            "choices": asdict(self.method),
            "coverage": self.coverage.as_json(),
            "sites": [asdict(site) for site in self.sites],
            "notes": list(self.notes),
            **({} if self.gap is None else {"data_gap": self.gap.as_json()}),
            **({} if self.polish is None else {"polish": dict(self.polish)}),
            **({} if self.sparsity is None else {"sparsity": self.sparsity.as_json()}),
        }


def uniform_widths(model: nn.Module, method: Method) -> dict[str, int]:
    """Return the width of every site that the method reduces, with the same share kept everywhere, aligned."""
    widths = {site.name: kind_of(site).uniform(site, method) for site in sites_of(model).every}
    return {name: width for name, width in widths.items() if width is not None}


def notes_on(sites: Sites, method: Method, widths: Widths) -> tuple[str, ...]:
    """Return a sentence on each site that stays unchanged although a reduction was asked, with the reason."""
    notes = [f"{refusal.name} kept as it is: {refusal.reason}" for refusal in sites.refused]
    own = (kind_of(site).note(site, method, widths.get(site.name)) for site in sites.every)
    notes += [note for note in own if note is not None]
    if method.attention_sparsity and method.qk_recovery == "keep":
        notes.append("attention kept as it is: this preset's method reduces MLPs only")
    return tuple(notes)


def reduce_site(
    site: Site,
    *,
    widths: Widths,
    moments: Moments,
    method: Method,
    where: torch.device,
    chosen: Mapping[str, Elimination | Tensor | None],
    held_out: Moments | None = None,
) -> TracedReduced:
    """Return one site reduced to its width; `chosen`: by site, an elimination or kept channels computed before."""
    width, cached = widths[site.name], chosen.get(site.name)
    own = site_moments(site, moments, where)
    others = None if held_out is None else site_moments(site, held_out, where)
    splits = splits_at(site, moments, own, where)
    return kind_of(site).reduced(site, own, method, width, cached=cached, held_out=others, splits=splits)


def _build_narrower(
    model: nn.Module, new: Mapping[str, TracedReduced], images: InputSet | None
) -> tuple[nn.Module, dict[str, str]]:
    """Return the narrower model, and by name why sites were left unchanged.

    `images`: those that convolutions are rescaled on, None without rescaling.
    """
    if not new:
        return replace_submodules(model, {}).eval().requires_grad_(False), {}
    narrower = {name: each for name, each in new.items() if each.is_narrower}
    kept, unreduced = prove_kept(model, groups_left(narrower))
    tensors = changed_tensors({name: each for name, each in narrower.items() if name in kept})
    if images is not None:
        tensors = rescaled_tensors(model, kept, tensors, images)
    dtype = next(model.parameters()).dtype
    return narrow_model(model, kept, {name: tensor.to(dtype) for name, tensor in tensors.items()}), unreduced


def reduce(
    model: nn.Module,
    moments: Moments,
    method: Method,
    *,
    widths: Widths | None = None,
    eliminations: Mapping[str, Elimination] | None = None,
    held_out: Moments | None = None,
    images: InputSet | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> Reduction:
    """Return a new model with the widths asked for and the loss repaired in closed form.

    All runs on the model's device.

    Args:
        model: the dense model, which is not changed.
        moments: those of its calibration.
        method: what to remove and how to repair it.
        widths: by site, in place of the method's uniform ones; a site that is not named stays dense.
        eliminations: orders of removal by site, computed before, for selection `obs`.
        held_out: moments of other images, which judge every site again.
        images: needed to merge channels (the calibration images and the held-out ones, told apart by their content) and
            to rescale convolutions (those not held out).
        on_progress: called with the number of finished sites and of all sites.
        watch: records the time of selecting as a part of its own.

    Raises:
        BadInput: the moments are of another model or lack what the method needs, or held-out images are calibration
            images too.
    """
    require_same_model(model, moments)
    if held_out is not None:
        require_same_model(model, held_out)
        require_disjoint(moments, held_out)
    rescaling_images = require_rescalable(model, without_held_out(images, held_out)) if method.rescales else None
    target_widths = uniform_widths(model, method) if widths is None else widths
    sites, where = sites_of(model), device_of(model)
    merged, notes = merge_sites(model, target_widths, moments, method, images, held_out, watch)
    affected = [site for site in sites.every if site.name in target_widths]

    def choose(site: Site) -> Tensor | None:
        cached = (eliminations or {}).get(site.name)
        own = site_moments(site, moments, where)
        return kind_of(site).chosen(site, own, method, target_widths[site.name], cached)

    apart, found = [site for site in affected if site.name not in merged], dict(merged)
    with pool.mapping(len(apart), where) as each:
        with measure_effort(watch, "select"):
            chosen = dict(zip((site.name for site in apart), each(choose, apart), strict=True))
        of_widths = partial(
            reduce_site,
            widths=target_widths,
            moments=moments,
            method=method,
            where=where,
            chosen=chosen,
            held_out=held_out,
        )
        for site, new in zip(apart, each(of_widths, apart), strict=True):
            found[site.name] = new
            if on_progress is not None:
                on_progress(len(found), len(affected))
    found = {site.name: found[site.name] for site in affected}
    reduced, unreduced = _build_narrower(model, found, rescaling_images)
    reports = [report for name, new in found.items() if name not in unreduced for report in new.reports]
    kept_notes = (f"{name} kept as it is: {reason}" for name, reason in unreduced.items())
    return Reduction(
        model=reduced,
        method=method,
        sites=tuple(reports if widths is None else as_allocated(reports)),
        coverage=coverage(sites, method, target_widths, by_site=widths is not None),
        notes=(*notes_on(sites, method, target_widths), *notes, *kept_notes),
        decisions=() if rescaling_images is None else (RESCALING_NOTE,),
    )
