"""Reduce: (model, moments, choices) -> a new, smaller, ordinary model and what was lost at every site.

Selections and recoveries say what to do; here it is done, once, on new modules. The model given is never edited.

Legend: F MLP channels, O outputs, K kept, C model width, H heads, D dense head width, R reduced head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from calib.moments import AttentionMoments, MlpMoments, Moments

from . import recover_mlp, vit
from .choices import Choices, aligned_width
from .errors import BadInput
from .inputs import model_digest
from .obs import obs
from .reduce_attention import qk_at_site
from .select import combined, energy, kept_from_scores, magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteReport:
    """What happened at one site. Errors are mean squares per token (MLP output) or per token pair's share of the
    logits (Q/K), on the calibration images; `energy` is the dense signal in the same unit, so error / energy is the
    share lost."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduced model with the report of every site that was reduced, and the notes on those that were not."""

    model: nn.Module
    choices: Choices
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Choices, sites and notes as plain JSON values."""
        return {
            "choices": asdict(self.choices),
            "sites": [asdict(site) for site in self.sites],
            "notes": list(self.notes),
        }


def _select(choices: Choices, moments: MlpMoments, weight_OF: Tensor, width: int) -> Tensor:
    match choices.mlp_selection:
        case "obs":
            return obs(moments.covariance_FF, weight_OF, ridge_rel=choices.ridge_rel).kept(width)
        case "energy":
            score_F = energy(moments.second_FF.diagonal())
        case "magnitude":
            score_F = magnitude(weight_OF)
        case "combined":
            score_F = combined(moments.second_FF.diagonal(), weight_OF)
    return kept_from_scores(score_F, width)


_MLP_RECOVERIES: Mapping[str, Callable[..., recover_mlp.MlpRecovery]] = {
    "none": recover_mlp.none,
    "bias": recover_mlp.bias,
    "affine": recover_mlp.affine,
}


def _reduced_mlp(part: vit.MlpPart, moments: MlpMoments, choices: Choices) -> tuple[dict[str, nn.Module], SiteReport]:
    weight_OF = part.fc2.weight.detach().double()
    bias_O = None if part.fc2.bias is None else part.fc2.bias.detach().double()
    width = aligned_width(part.hidden, choices.mlp_sparsity, choices.align_hidden)
    kept_K = _select(choices, moments, weight_OF, width)
    recovered = _MLP_RECOVERIES[choices.mlp_recovery](
        moments.mean_F, moments.second_FF, weight_OF, bias_O, kept_K, ridge_rel=choices.ridge_rel
    )
    modules = vit.empty_mlp(part, hidden=width, output_bias=bias_O is not None or bool(recovered.bias_O.any()))
    fc1, fc2 = modules.values()
    _fill(fc1, part.fc1.weight[kept_K], None if part.fc1.bias is None else part.fc1.bias[kept_K])
    _fill(fc2, recovered.weight_OK, recovered.bias_O)
    report = SiteReport(
        site=part.name,
        part="mlp",
        width_dense=part.hidden,
        width_asked=part.hidden * (1.0 - choices.mlp_sparsity),
        width=width,
        energy=float(((weight_OF @ moments.covariance_FF) * weight_OF).sum()),
        error_uncompensated=recovered.residual_uncompensated,
        error=recovered.residual,
        r2=recovered.r2,
        condition=recovered.condition,
        ridge=recovered.ridge,
    )
    return modules, report


@torch.no_grad()
def _fill(linear: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Set a new linear layer; the one place where float64 results become the model's type."""
    assert isinstance(linear, nn.Linear), type(linear)
    linear.weight.copy_(weight)
    if linear.bias is not None:
        assert bias is not None, "a layer with bias needs one"
        linear.bias.copy_(bias)


def _mapped_rows(rows_XC: Tensor, maps_HRD: Tensor) -> Tensor:
    """Apply each head's map to its rows: [H*D, C] (or [H*D]) -> [H*R, C] (or [H*R])."""
    heads, _, dense = maps_HRD.shape
    by_head = rows_XC.double().reshape(heads, dense, -1)
    return (maps_HRD @ by_head).reshape(-1, *rows_XC.shape[1:])


def _reduced_attention(
    part: vit.AttentionPart, moments: AttentionMoments, choices: Choices
) -> tuple[dict[str, nn.Module], SiteReport]:
    width = aligned_width(part.qk, choices.attention_sparsity, choices.align_head)
    at_site = qk_at_site(part.name, moments, choices, width)
    recovered = at_site.recovery
    geometry = "square" if width == part.v else choices.geometry
    module = vit.empty_attention(part, qk=width, v=part.v, geometry=geometry)
    dense_rows = part.heads * part.qk

    def reduced_rows(rows: Tensor) -> Tensor:
        q, k = rows[:dense_rows], rows[dense_rows : 2 * dense_rows]
        mapped = _mapped_rows(q, recovered.q_map_HRD), _mapped_rows(k, recovered.k_map_HRD)
        return torch.cat((*mapped, rows[2 * dense_rows :].double()))

    bias = None if part.qkv.bias is None else reduced_rows(part.qkv.bias.detach())
    _fill(module.qkv, reduced_rows(part.qkv.weight.detach()), bias)
    _fill(module.proj, part.proj.weight, part.proj.bias)
    report = SiteReport(
        site=part.name,
        part="qk",
        width_dense=part.qk,
        width_asked=part.qk * (1.0 - choices.attention_sparsity),
        width=width,
        energy=float(at_site.energy_H.sum()),
        error_uncompensated=float(recovered.residual_uncompensated_H.sum()),
        error=float(recovered.residual_H.sum()),
        r2=recovered.r2,
        condition=recovered.condition,
        ridge=recovered.ridge,
    )
    return {part.name: module}, report


def _moments_of(site: str, moments: Moments, kind: type) -> Any:
    found = moments.sites.get(site)
    if not isinstance(found, kind):
        raise BadInput(f"{site}: the moments hold no statistics of this site; calibrate again without leaving it out")
    return found


def _require_same_model(model: nn.Module, moments: Moments) -> None:
    expected, found = model_digest(model), moments.lineage.get("model", "none")
    if expected != found:
        raise BadInput(
            f"the moments were taken on another model (sha256 {found[:16]}..., this model is {expected[:16]}...); "
            "calibrate this model, or give the weights the moments were taken with"
        )


def reduce(
    model: nn.Module, moments: Moments, choices: Choices, *, done: Callable[[int], None] | None = None
) -> Reduction:
    """A new model with the widths the choices ask for and the loss repaired in closed form.

    `done` is told how many sites are finished. Raises BadInput for moments of another model or without what the
    choices need.
    """
    _require_same_model(model, moments)
    told = done or (lambda _: None)
    found = vit.parts(model)
    modules: dict[str, nn.Module] = {}
    reports: list[SiteReport] = []
    notes = [f"{refusal.name} kept as it is: {refusal.reason}" for refusal in found.refused]
    if choices.mlp_sparsity > 0.0:
        for mlp in found.mlps:
            new, report = _reduced_mlp(mlp, _moments_of(mlp.name, moments, MlpMoments), choices)
            modules |= new
            reports.append(report)
            told(len(reports))
    if choices.attention_sparsity > 0.0:
        for part in found.attentions:
            if part.keeps_qk:
                notes.append(f"{part.name} keeps Q/K: {part.keeps_qk}")
            else:
                new, report = _reduced_attention(part, _moments_of(part.name, moments, AttentionMoments), choices)
                modules |= new
                reports.append(report)
            told(len(reports))
    reduced = vit.replaced(model, modules).eval().requires_grad_(False)
    return Reduction(model=reduced, choices=choices, sites=tuple(reports), notes=tuple(notes))
