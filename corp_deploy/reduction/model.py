"""Reduce: (model, moments, method) -> a new, smaller, ordinary model and what was lost at every site.

Selections and recoveries say what to do; here it is done, once, on new modules. The model given is never edited.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from calib.images import Images
from calib.moments import ChannelMoments, HeadMoments, Moments, OneKind, on_device
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths, Widths, aligned_width, head_widths
from corp_deploy.store.inputs import model_digest, preprocessing_text
from ground.errors import BadInput

from . import pool as site_pool
from .coverage import Coverage, coverage
from .folded import ShownImages, folded_mlps
from .method import Method
from .report import SiteReport, as_allocated
from .site import reduced_attention, reduced_mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduced model with the report of every site that the method went through, how many of those it was asked for
    became smaller, and the notes on those that did not.

    `said`: a sentence on each thing that was decided on the way.
    """

    model: nn.Module
    method: Method
    sites: tuple[SiteReport, ...]
    coverage: Coverage
    notes: tuple[str, ...]
    said: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Choices, sites, coverage and notes as plain JSON values."""
        sites = [asdict(site) for site in self.sites]
        return {
            "choices": asdict(self.method),
            "coverage": self.coverage.as_json(),
            "sites": sites,
            "notes": list(self.notes),
        }


def uniform_widths(model: nn.Module, method: Method) -> dict[str, int | HeadWidths]:
    """Every site that the method reduces, with the same share kept everywhere, aligned."""
    found = vit.sites(model)
    widths: dict[str, int | HeadWidths] = {}
    if method.mlp_sparsity is not None:
        share, align = method.mlp_kept, method.align_hidden
        widths |= {part.name: aligned_width(part.hidden, share, align) for part in found.mlps}
    if method.reduces_attention:
        widths |= {part.name: _uniform_heads(part, method) for part in found.attentions if _shrinks(part, method)}
    return widths


def _shrinks(part: vit.HeadSite, method: Method) -> bool:
    """Where Q/K must stay, only square heads ask for something else: the values."""
    return not part.keeps_qk or method.geometry == "square"


def _uniform_heads(part: vit.HeadSite, method: Method) -> HeadWidths:
    size = aligned_width(part.size, method.attention_kept, method.align_head)
    return head_widths(size, part.widths, method.geometry, keeps_qk=bool(part.keeps_qk))


def site_moments(site: str, moments: Moments, kind: type[OneKind], model: nn.Module) -> OneKind:
    """The statistics of one site, where the model is. Raises BadInput when the moments were taken without it."""
    found = moments.sites.get(site)
    if not isinstance(found, kind):
        raise BadInput(f"{site}: the moments hold no statistics of this site; calibrate again without leaving it out")
    return on_device(found, vit.device(model))


def require_apart(moments: Moments, held_out: Moments) -> None:
    """Raise BadInput unless no image is in both; else a site would judge itself."""
    common = int(torch.isin(held_out.image_ids, moments.image_ids).sum())
    if common:
        raise BadInput(
            f"held-out moments: {common} of their {held_out.images} images are calibration images too; calibrate them "
            "apart: calibrate --hold-out N writes both"
        )


def require_same_model(model: nn.Module, moments: Moments) -> None:
    """Raise BadInput unless the moments were taken on exactly these weights, of images prepared as this model asks."""
    expected, found = model_digest(model), moments.lineage.get("model", "none")
    if expected != found:
        raise BadInput(
            f"the moments were taken on another model (sha256 {found[:16]}..., this model is {expected[:16]}...); "
            "calibrate this model, or give the weights the moments were taken with"
        )
    wanted, had = preprocessing_text(model), moments.lineage.get("preprocessing", "none")
    if wanted != had:
        raise BadInput(
            f"the moments were taken with another preprocessing: theirs is {had}, this model's is {wanted}; calibrate "
            "again, or give the same name, --mean, --std, --crop-pct, --interpolation and --crop-mode as for calibrate"
        )


def _values_of(part: vit.HeadSite, width: int | HeadWidths | None) -> str:
    """What became of the values of an attention whose Q/K stay."""
    if not isinstance(width, HeadWidths):
        return "its values stay too, --heads square reduces them"
    return f"{width.v} of {part.v} value dimensions a head stay"


def notes_on(found: vit.Sites, method: Method, widths: Widths) -> tuple[str, ...]:
    """What stays as it is although something was asked of it, and why."""
    notes = [f"{refusal.name} kept as it is: {refusal.reason}" for refusal in found.refused]
    notes += [
        f"{part.name} keeps Q/K: {part.keeps_qk}; {_values_of(part, widths.get(part.name))}"
        for part in found.attentions
        if part.keeps_qk and (part.name in widths or (method.reduces_attention and method.attention_sparsity))
    ]
    if method.attention_sparsity and method.qk_recovery == "keep":
        notes.append("attention kept as it is: this preset's method reduces MLPs only")
    return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedSite:
    """The new modules of one site by name, and its reports."""

    modules: dict[str, nn.Module]
    reports: list[SiteReport]


def reduced_site(
    model: nn.Module,
    part: vit.ChannelSite | vit.HeadSite,
    moments: Moments,
    method: Method,
    width: int | HeadWidths,
    *,
    known: Elimination | None = None,
    held_out: Moments | None = None,
) -> ReducedSite:
    """One site at one width. `known` spares `obs` its elimination."""
    if isinstance(part, vit.ChannelSite):
        assert isinstance(width, int), (part.name, width)
        taken = site_moments(part.name, moments, ChannelMoments, model)
        others = None if held_out is None else site_moments(part.name, held_out, ChannelMoments, model)
        linears, report = reduced_mlp(part, taken, method, width, known, others)
        return ReducedSite(modules={**linears}, reports=[report])
    assert isinstance(width, HeadWidths), (part.name, width)
    at_heads = site_moments(part.name, moments, HeadMoments, model)
    heads = None if held_out is None else site_moments(part.name, held_out, HeadMoments, model)
    modules, reports = reduced_attention(part, at_heads, method, width, heads)
    return ReducedSite(modules=modules, reports=reports)


def _merged(
    model: nn.Module,
    widths: Widths,
    moments: Moments,
    method: Method,
    images: Images | None,
    held_out: Moments | None,
) -> tuple[dict[str, ReducedSite], tuple[str, ...]]:
    """The MLPs, by name, where channels are merged, and what is to be said of the images."""
    if not method.merges:
        return {}, ()
    if images is None:
        raise BadInput(
            "merged channels are fitted to and judged by what they give on the calibration images; give them: --images"
        )
    mlps = {part.name: part for part in vit.sites(model).mlps if part.name in widths}
    shown = ShownImages.of(images, moments, held_out)
    here = {name: site_moments(name, moments, ChannelMoments, model) for name in mlps}
    others = {} if held_out is None else {name: site_moments(name, held_out, ChannelMoments, model) for name in mlps}
    folded = folded_mlps(model, mlps, widths, here, others, method, shown)
    merged = {name: ReducedSite(modules={**linears}, reports=[report]) for name, (linears, report) in folded.items()}
    few = f"merged channels were fitted and judged on {shown.fitted} of the {moments.images} calibration images"
    return merged, (few,) if shown.fitted < moments.images else ()


def reduce(
    model: nn.Module,
    moments: Moments,
    method: Method,
    *,
    widths: Widths | None = None,
    eliminations: Mapping[str, Elimination] | None = None,
    held_out: Moments | None = None,
    images: Images | None = None,
    done: Callable[[int], None] | None = None,
) -> Reduction:
    """A new model with the widths asked for and the loss repaired in closed form.

    `widths` by site replaces the uniform ones of the method; a site not named stays dense. `eliminations` by site
    spares the `obs` selection its work at a second width. `held_out`, moments of other images, judges every site
    again. `images` are looked at where channels are merged: the calibration images, and those held out, told apart by
    their content. `done` is told how many sites are finished. All runs where the model is.
    Raises BadInput for moments of another model or without what the method needs, and for held-out images that are
    calibration images too.
    """
    require_same_model(model, moments)
    if held_out is not None:
        require_same_model(model, held_out)
        require_apart(moments, held_out)
    wanted = uniform_widths(model, method) if widths is None else widths
    found = vit.sites(model)
    modules: dict[str, nn.Module] = {}
    reports: list[SiteReport] = []
    merged, few = _merged(model, wanted, moments, method, images, held_out)

    def at_site(part: vit.ChannelSite | vit.HeadSite) -> ReducedSite:
        if part.name in merged:
            return merged[part.name]
        known = None if eliminations is None else eliminations.get(part.name)
        return reduced_site(model, part, moments, method, wanted[part.name], known=known, held_out=held_out)

    sites = [part for part in found.every if part.name in wanted]
    for finished, new in enumerate(site_pool.each(at_site, sites, vit.device(model)), start=1):
        modules |= new.modules
        reports += new.reports
        if done is not None:
            done(finished)
    reports = reports if widths is None else as_allocated(reports)
    reduced = vit.replaced(model, modules).eval().requires_grad_(False)
    return Reduction(
        model=reduced,
        method=method,
        sites=tuple(reports),
        coverage=coverage(found, method, wanted, by_site=widths is not None),
        notes=(*notes_on(found, method, wanted), *few),
    )
