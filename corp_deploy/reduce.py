"""Reduce: (model, moments, choices) -> a new, smaller, ordinary model and what was lost at every site.

Selections and recoveries say what to do; here it is done, once, on new modules. The model given is never edited.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import AttentionMoments, MlpMoments, Moments

from . import reduce_attention, vit
from .choices import Choices, HeadWidths, Widths, aligned_width, head_widths
from .errors import BadInput
from .inputs import model_digest
from .obs import Elimination
from .reduce_attention import HeadMaps, qk_at_site, values_at_site
from .reduce_mlp import MlpLayers, mlp_at_site, output_energy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFit:
    """How the closed loop refitted a site's last linear layer toward the dense residual stream.

    Mean squares per token of what the reduced stream lacks of the dense one after the sublayer: as recovered, and as
    refitted, on the images of the fit and on those held out to choose `strength` (of the pull toward the recovered
    layer; None where no refit was best). A held-out error well above `error` is over-fitting. `energy` is the dense
    stream's variance per token.
    """

    strength: float | None
    energy: float
    error_recovered: float
    error: float
    error_recovered_held_out: float
    error_held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """What happened to one part (mlp, qk, v) of a site.

    Errors are mean squares on the calibration images: of the output per token for `mlp` and `v`, of the logits for
    `qk`. `energy` is the dense signal in the same unit, so error / energy is the share lost. `loop` is there where the
    closed loop refitted the site's last layer.
    """

    site: str
    part: str
    width_dense: int
    width_asked: float
    width: int
    energy: float
    error_uncompensated: float
    error: float
    r2: float
    condition: float
    ridge: float
    loop: LoopFit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduced model with the report of every site that was reduced, and the notes on those that were not."""

    model: nn.Module
    choices: Choices
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Choices, sites and notes as plain JSON values."""
        sites = [asdict(site) for site in self.sites]
        return {"choices": asdict(self.choices), "sites": sites, "notes": list(self.notes)}


@torch.no_grad()
def fill(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Set a new linear layer; the one place where float64 results become the model's type."""
    linear.weight.copy_(weight)
    if linear.bias is not None:
        assert bias is not None, "a layer with bias needs one"
        linear.bias.copy_(bias)


def layers_of(part: vit.MlpPart) -> MlpLayers:
    """The MLP's dense layers in float64."""
    return MlpLayers(
        first_FI=part.fc1.weight.detach().double(),
        first_bias_F=None if part.fc1.bias is None else part.fc1.bias.detach().double(),
        second_OF=part.fc2.weight.detach().double(),
        second_bias_O=None if part.fc2.bias is None else part.fc2.bias.detach().double(),
    )


def reduced_mlp(
    part: vit.MlpPart, moments: MlpMoments, choices: Choices, width: int, known: Elimination | None
) -> tuple[dict[str, nn.Linear], SiteReport]:
    """New fc1 and fc2 of one MLP by module name, and the site's report."""
    layers = layers_of(part)
    new = mlp_at_site(moments, layers, choices, width, known)
    needs_bias = layers.second_bias_O is not None or bool(new.recovery.bias_O.any())
    modules = vit.empty_mlp(part, hidden=width, output_bias=needs_bias)
    fc1, fc2 = modules.values()
    fill(fc1, new.first_KI, new.first_bias_K)
    fill(fc2, new.recovery.weight_OK, new.recovery.bias_O)
    report = SiteReport(
        site=part.name,
        part="mlp",
        width_dense=part.hidden,
        width_asked=part.hidden * (1.0 - choices.mlp_sparsity),
        width=width,
        energy=output_energy(moments, layers),
        error_uncompensated=new.recovery.residual_uncompensated,
        error=new.recovery.residual,
        r2=new.recovery.r2,
        condition=new.recovery.condition,
        ridge=new.recovery.ridge,
    )
    return modules, report


def reduced_attention(
    part: vit.AttentionPart, moments: AttentionMoments, choices: Choices, widths: HeadWidths
) -> tuple[dict[str, nn.Module], list[SiteReport]]:
    """The new attention module by name, and a report each for Q/K and, where they change, the values."""
    at_site = qk_at_site(part.name, moments, choices, widths.qk)
    weight_OC = part.proj.weight.detach().double()
    bias_O = None if part.proj.bias is None else part.proj.bias.detach().double()
    values = values_at_site(moments, choices, weight_OC, bias_O, part.heads, widths.v)
    geometry = "square" if widths.qk == widths.v else choices.geometry
    needs_bias = bias_O is not None or bool(values.bias_O.any())
    module = vit.empty_attention(part, qk=widths.qk, v=widths.v, geometry=geometry, proj_bias=needs_bias)
    maps = HeadMaps(q_HRD=at_site.recovery.q_map_HRD, k_HRD=at_site.recovery.k_map_HRD, v_HRD=values.v_map_HRV)
    bias = None if part.qkv.bias is None else maps.applied(part.qkv.bias.detach())
    fill(module.qkv, maps.applied(part.qkv.weight.detach()), bias)
    fill(module.proj, values.weight_OK, values.bias_O)
    asked = 1.0 - choices.attention_sparsity
    reports = [
        SiteReport(
            site=part.name,
            part="qk",
            width_dense=part.qk,
            width_asked=part.qk * asked,
            width=widths.qk,
            energy=float(at_site.energy_H.sum()),
            error_uncompensated=float(at_site.recovery.residual_uncompensated_H.sum()),
            error=float(at_site.recovery.residual_H.sum()),
            r2=at_site.recovery.r2,
            condition=at_site.recovery.condition,
            ridge=at_site.recovery.ridge,
        )
    ]
    if widths.v != part.v:
        reports.append(
            SiteReport(
                site=part.name,
                part="v",
                width_dense=part.v,
                width_asked=part.v * asked,
                width=widths.v,
                energy=reduce_attention.output_energy(moments, weight_OC),
                error_uncompensated=values.residual_uncompensated,
                error=values.residual,
                r2=values.r2,
                condition=values.condition,
                ridge=values.ridge,
            )
        )
    return {part.name: module}, reports


def uniform_widths(model: nn.Module, choices: Choices) -> dict[str, int | HeadWidths]:
    """Every site that the choices reduce, with the same share kept everywhere, aligned."""
    found = vit.parts(model)
    widths: dict[str, int | HeadWidths] = {}
    if choices.mlp_sparsity > 0.0:
        share, align = 1.0 - choices.mlp_sparsity, choices.align_hidden
        widths |= {part.name: aligned_width(part.hidden, share, align) for part in found.mlps}
    if choices.reduces_attention:
        widths |= {part.name: head_widths(part.qk, part.v, choices) for part in found.attentions if not part.keeps_qk}
    return widths


def site_moments(site: str, moments: Moments, kind: type) -> Any:
    """The statistics of one site. Raises BadInput when the moments were taken without it."""
    found = moments.sites.get(site)
    if not isinstance(found, kind):
        raise BadInput(f"{site}: the moments hold no statistics of this site; calibrate again without leaving it out")
    return found


def require_same_model(model: nn.Module, moments: Moments) -> None:
    """Raise BadInput unless the moments were taken on exactly these weights."""
    expected, found = model_digest(model), moments.lineage.get("model", "none")
    if expected != found:
        raise BadInput(
            f"the moments were taken on another model (sha256 {found[:16]}..., this model is {expected[:16]}...); "
            "calibrate this model, or give the weights the moments were taken with"
        )


def notes_on(found: vit.Parts, choices: Choices) -> tuple[str, ...]:
    """What stays as it is although something was asked of it, and why."""
    notes = [f"{refusal.name} kept as it is: {refusal.reason}" for refusal in found.refused]
    if choices.attention_sparsity > 0.0:
        notes += [f"{part.name} keeps Q/K: {part.keeps_qk}" for part in found.attentions if part.keeps_qk]
        if choices.qk_recovery == "keep":
            notes.append("attention kept as it is: this preset's method reduces MLPs only")
    return tuple(notes)


def reduce(
    model: nn.Module,
    moments: Moments,
    choices: Choices,
    *,
    widths: Widths | None = None,
    eliminations: Mapping[str, Elimination] | None = None,
    done: Callable[[int], None] | None = None,
) -> Reduction:
    """A new model with the widths asked for and the loss repaired in closed form.

    `widths` by site replaces the uniform ones of the choices; a site not named stays dense. `eliminations` by site
    spares the `obs` selection its work at a second width. `done` is told how many sites are finished.
    Raises BadInput for moments of another model or without what the choices need.
    """
    require_same_model(model, moments)
    wanted = uniform_widths(model, choices) if widths is None else widths
    found = vit.parts(model)
    modules: dict[str, nn.Module] = {}
    reports: list[SiteReport] = []
    finished = 0
    for part in found.every:
        width = wanted.get(part.name)
        if width is None:
            continue
        if isinstance(part, vit.MlpPart):
            assert isinstance(width, int), (part.name, width)
            known = None if eliminations is None else eliminations.get(part.name)
            new, report = reduced_mlp(part, site_moments(part.name, moments, MlpMoments), choices, width, known)
            modules |= new
            reports.append(report)
        else:
            assert isinstance(width, HeadWidths), (part.name, width)
            at_site = site_moments(part.name, moments, AttentionMoments)
            attention, several = reduced_attention(part, at_site, choices, width)
            modules |= attention
            reports += several
        finished += 1
        if done is not None:
            done(finished)
    reduced = vit.replaced(model, modules).eval().requires_grad_(False)
    return Reduction(model=reduced, choices=choices, sites=tuple(reports), notes=notes_on(found, choices))
