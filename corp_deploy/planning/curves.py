"""What every site costs and loses at every width: error curves, weighted by what each site does to the outputs.

The curve of a site is in its own unit (mean square of the MLP's output, of the logits, of the projection's output). One
probe per curve, without labels, turns all into one currency: the site alone is reduced to three widths, and the
squared change of the model's outputs over the curve's value there is its weight.
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
from corp_deploy.spec.widths import Width, is_empty
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.sites import Currency, Site
from ground.errors import BadInput

from .curvature import output_metrics
from .probe import Probe, Trial

TRIED = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCurve:
    """What a site loses at each width that a budget may choose, narrowest first, in its own unit."""

    widths: tuple[Width, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.errors) == len(self.widths), self


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCurve:
    """One site: the widths it may have, narrowest first, the cost of each and the squared output error each is worth.

    `cost_now` is the site's cost in the model as it is, which may differ from that of the same widths in new modules.
    Sites `tied` by a word stand at the same place among their widths.
    """

    site: str
    widths: tuple[Width, ...]
    costs: tuple[int, ...]
    errors: tuple[float, ...]
    cost_now: int
    tied: str = ""


def narrowable(model: nn.Module) -> list[Site]:
    """The sites of which more than a constant is left."""
    return [site for site in sites_of(model).every if not is_empty(site.width)]


def _chosen(model: nn.Module, method: Method) -> list[Site]:
    """The sites of which a budget chooses the width."""
    return [site for site in narrowable(model) if len(kind_of(site).offers(site, method)) > 1]


def _chosen_by_order(model: nn.Module, method: Method) -> list[Site]:
    """And of these the channels that stay."""
    return [site for site in _chosen(model, method) if kind_of(site).eliminates]


def site_metrics(model: nn.Module, method: Method, inputs: Inputs) -> dict[str, Tensor]:
    """What changes of the outputs of layers do to the model's, where these choose which channels of a site stay."""
    readings = (reading for site in _chosen_by_order(model, method) for reading in site.readings)
    return output_metrics(model, inputs, {reading.weight for reading in readings})


def eliminations(model: nn.Module, moments: Moments, method: Method) -> dict[str, Elimination]:
    """Every order of removal; made once, it serves every width of a sweep or a budget."""
    where, sites = device_of(model), _chosen_by_order(model, method)

    def at_site(site: Site) -> Elimination | None:
        return kind_of(site).elimination(site, site_moments(site, moments, where), method)

    with pool.mapping(len(sites), where) as each:
        return {site.name: order for site, order in zip(sites, each(at_site, sites), strict=True) if order is not None}


def _tried(curve: ErrorCurve) -> list[int]:
    """The positions of a quarter, half and three quarters of the way, and where a constant is all that stays."""
    narrower = len(curve.errors) - 1
    empty = {0} if is_empty(curve.widths[0]) else set[int]()
    return sorted(empty | {min(max(round(part * len(curve.errors)) - 1, 0), narrower - 1) for part in TRIED})


def _in_outputs(curve: ErrorCurve, effects: Sequence[float]) -> tuple[float, ...]:
    """The curve as output error: that which was measured where it was tried, and between those places its own shape.

    The ratio of both is interpolated, geometrically, and kept beyond the ends. What a constant loses is what was
    measured, and says nothing of any width.
    """
    empty = effects[0] if is_empty(curve.widths[0]) else None
    trials = [
        (at, math.log(effect / curve.errors[at]))
        for at, effect in zip(_tried(curve), effects, strict=True)
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
    """The curves in their own units of all sites that have a choice of width; and the squared relative output error of
    every site of which a constant alone stays, which is no small change.
    """

    by_site: Mapping[str, ErrorCurve]
    folded_to_constant: Mapping[Trial, float]

    @property
    def trials(self) -> list[Trial]:
        """All that is tried."""
        return [(name, curve.widths[at]) for name, curve in self.by_site.items() for at in _tried(curve)]


def site_curves(probe: Probe) -> SiteCurves:
    """By the moments, and a few inputs with each site in turn left a constant. Raises BadInput for one without."""
    method, model = probe.method, probe.model
    if not method.has_curves:
        raise BadInput(
            "a budget follows the error curves of preset best (obs, affine and lowrank); expected --preset best, with "
            "no other --select, --repair and --qk"
        )
    sites, where = _chosen(model, method), device_of(model)

    def curve_at(site: Site) -> ErrorCurve:
        kind, cached = kind_of(site), probe.eliminations.get(site.name)
        errors = kind.errors(site, site_moments(site, probe.moments, where), method, cached)
        return ErrorCurve(widths=kind.offers(site, method), errors=errors)

    with pool.mapping(len(sites), where) as each:
        by_site = dict(zip((site.name for site in sites), each(curve_at, sites), strict=True))
    plain = SiteCurves(by_site=by_site, folded_to_constant={})
    empty = [trial for trial in plain.trials if is_empty(trial[1])]
    return replace(plain, folded_to_constant=probe.few.effects(empty) if empty else {})


def output_errors(probe: Probe, curves: SiteCurves) -> dict[str, tuple[float, ...]]:
    """What every width of a site loses of the outputs, squared, relative; one look of the probe tries a few."""
    small = [trial for trial in curves.trials if trial not in curves.folded_to_constant]
    effects = {**curves.folded_to_constant, **probe.linear_effects(small)}
    errors = {
        name: _in_outputs(curve, [effects[name, curve.widths[at]] for at in _tried(curve)])
        for name, curve in curves.by_site.items()
    }
    return {site.name: errors.get(site.name, (0.0,)) for site in narrowable(probe.model)}


def cost_curves(probe: Probe, currency: Currency, *, curves: SiteCurves | None = None) -> list[CostCurve]:
    """Every site's costs and output errors by width. `curves` spares `site_curves`. An attention whose Q/K must stay
    has those of its values.
    """
    errors = output_errors(probe, site_curves(probe) if curves is None else curves)
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
