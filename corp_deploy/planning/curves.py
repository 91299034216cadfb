"""Cost curves: what every site costs and loses at every width, in one unit for all sites.

The error curve of a site is in its own unit (mean square of the MLP's output, of the logits, of the projection's
output). A probe without labels turns all curves into output errors: each site alone is reduced to three widths, and the
curve is scaled by the squared change of the model's outputs over the curve's value there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from calib.inputs import Inputs
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.counting import site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction import pool
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.moments import site_moments
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.sites import Currency, Site
from ground.errors import BadInput

from .curvature import compute_output_metrics
from .probe import Probe, SiteTrial

TRIED = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCurve:
    """The error of a site, in its own unit, at each width that a budget may choose, narrowest first."""

    widths: tuple[int, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.errors) == len(self.widths), self


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """One site's possible widths, narrowest first, with the cost and the squared relative output error of each.

    `cost_now` is the site's cost in the present model. A plan must give sites with the same non-empty `tied` widths at
    the same position in their lists.
    """

    site: str
    widths: tuple[int, ...]
    costs: tuple[int, ...]
    errors: tuple[float, ...]
    cost_now: int
    tied: str = ""


def narrowable(model: nn.Module) -> list[Site]:
    """List the sites that still have channels; an earlier reduction may have replaced others by constants."""
    return [site for site in sites_of(model).every if site.width > 0]


def _sites_with_choice(model: nn.Module, method: Method) -> list[Site]:
    """List the sites whose width a budget chooses."""
    return [site for site in narrowable(model) if len(kind_of(site).offers(site, method)) > 1]


def _eliminating_sites(model: nn.Module, method: Method) -> list[Site]:
    """List the sites whose width a budget chooses and whose kept channels an elimination chooses."""
    return [site for site in _sites_with_choice(model, method) if kind_of(site).eliminates]


def compute_site_metrics(model: nn.Module, method: Method, inputs: Inputs) -> dict[str, Tensor]:
    """Return, by name of weight, the output metrics of layers that read sites whose channels an elimination chooses."""
    readings = (reading for site in _eliminating_sites(model, method) for reading in site.readings)
    return compute_output_metrics(model, inputs, {reading.weight for reading in readings})


def compute_eliminations(model: nn.Module, moments: Moments, method: Method) -> dict[str, Elimination]:
    """Compute the order in which each site loses channels, at any width; sites without elimination have none."""
    where, sites = device_of(model), _eliminating_sites(model, method)

    def at_site(site: Site) -> Elimination | None:
        return kind_of(site).elimination(site, site_moments(site, moments, where), method)

    with pool.mapping(len(sites), where) as each:
        return {site.name: order for site, order in zip(sites, each(at_site, sites), strict=True) if order is not None}


def _probed_positions(curve: ErrorCurve) -> list[int]:
    """Return a curve's positions of a quarter, half and three quarters of its widths, and of width 0 if offered."""
    narrower = len(curve.errors) - 1
    empty = {0} if curve.widths[0] == 0 else set[int]()
    return sorted(empty | {min(max(round(part * len(curve.errors)) - 1, 0), narrower - 1) for part in TRIED})


def _in_outputs(curve: ErrorCurve, effects: Sequence[float]) -> tuple[float, ...]:
    """Return the squared relative output error at each width, given `effects`, those measured at probed positions.

    The ratio of effect to error is interpolated geometrically between these positions and constant beyond them. The
    effect of width 0 is used for that width only.
    """
    empty = effects[0] if curve.widths[0] == 0 else None
    trials = [
        (at, math.log(effect / curve.errors[at]))
        for at, effect in zip(_probed_positions(curve), effects, strict=True)
        if effect > 0.0 and curve.errors[at] > 0.0 and (at > 0 or empty is None)
    ]
    if not trials:
        return (0.0 if empty is None else empty, *(0.0,) * (len(curve.errors) - 1))
    at, logs = zip(*trials, strict=True)
    ratios = np.interp(range(len(curve.errors)), at, logs)
    scaled = tuple(error * math.exp(ratio) for error, ratio in zip(curve.errors, ratios, strict=True))
    return scaled if empty is None else (empty, *scaled[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCurves:
    """The error curves, in their own units, of all sites that have a choice of width.

    `folded_to_constant` is the squared relative output error if a site is replaced by a constant (width 0), measured
    exactly because first-order estimates hold for small changes only.
    """

    by_site: Mapping[str, ErrorCurve]
    folded_to_constant: Mapping[SiteTrial, float]

    @property
    def trials(self) -> list[SiteTrial]:
        """Every site and width that the probe tries."""
        return [(name, curve.widths[at]) for name, curve in self.by_site.items() for at in _probed_positions(curve)]


def compute_site_curves(probe: Probe) -> SiteCurves:
    """Compute the error curves from the moments, and measure on a few inputs what replacing sites by constants costs.

    Raises BadInput if the method has no error curves.
    """
    method, model = probe.method, probe.model
    if not method.has_curves:
        raise BadInput(
            "a budget follows the error curves of preset best (obs, affine and lowrank); expected --preset best, with "
            "no other --select, --repair and --qk"
        )
    sites, where = _sites_with_choice(model, method), device_of(model)

    def curve_at(site: Site) -> ErrorCurve:
        kind, cached = kind_of(site), probe.eliminations.get(site.name)
        errors = kind.errors(site, site_moments(site, probe.moments, where), method, cached)
        return ErrorCurve(widths=kind.offers(site, method), errors=errors)

    with pool.mapping(len(sites), where) as each:
        by_site = dict(zip((site.name for site in sites), each(curve_at, sites), strict=True))
    plain = SiteCurves(by_site=by_site, folded_to_constant={})
    empty = [trial for trial in plain.trials if trial[1] == 0]
    return replace(plain, folded_to_constant=probe.on_few_inputs.effects(empty) if empty else {})


def measure_output_errors(probe: Probe, curves: SiteCurves) -> dict[str, tuple[float, ...]]:
    """Return the squared relative output errors of each site's widths by name, (0.0,) for a site without a choice."""
    small = [trial for trial in curves.trials if trial not in curves.folded_to_constant]
    effects = {**curves.folded_to_constant, **probe.linear_effects(small)}
    errors = {
        name: _in_outputs(curve, [effects[name, curve.widths[at]] for at in _probed_positions(curve)])
        for name, curve in curves.by_site.items()
    }
    return {site.name: errors.get(site.name, (0.0,)) for site in narrowable(probe.model)}


def compute_cost_curves(probe: Probe, currency: Currency, *, curves: SiteCurves | None = None) -> list[CostCurve]:
    """Return every site's costs and output errors by width; `curves` are those of `compute_site_curves`, if known."""
    errors = measure_output_errors(probe, compute_site_curves(probe) if curves is None else curves)
    costs, curves_of_sites = site_costs(probe.model, currency), []
    for site in narrowable(probe.model):
        widths = kind_of(site).offers(site, probe.method)
        curves_of_sites.append(
            CostCurve(
                site=site.name,
                widths=widths,
                costs=tuple(costs.of(site, width) for width in widths),
                errors=errors[site.name],
                cost_now=costs.now[site.name],
                tied=site.tied if probe.method.geometry == "square" and len(widths) > 1 else "",
            )
        )
    return curves_of_sites
