"""Widths for every share of one budget, from one look at the images."""

from dataclasses import dataclass, replace
from typing import Literal

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.counting import SiteCosts, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.sites import Currency
from ground.effort import Stopwatch, measured

from .budget import Allocation, allocate, dense_cost, out_of_reach, uniform_for_share
from .curves import CostCurve, SiteCurves, cost_curves, eliminations, site_curves, site_metrics
from .latency import LatencyTarget, curves_in_time, measure_tables
from .probe import Probe
from .probe_split import few_of, set_apart
from .width_plan import ProbedAllocation, WidthPlan, left_alone

_ROUNDING = 1e-12
_HALVINGS = 8
"""Of what curves are allowed beyond a budget."""


def probe_of(
    dense: Checkpoint,
    moments: Moments,
    method: Method,
    images: InputSet,
    loop: Loop | None = None,
    watch: Stopwatch | None = None,
) -> Probe:
    """With `loop`, what is tried end to end is tried in that closed loop, on a few of the images."""
    apart = set_apart(dense, moments, images)
    metrics = site_metrics(dense.model, method, few_of(dense, apart.few))
    with measured(watch, "select"):
        eliminations_by_site = eliminations(dense.model, replace(moments, metrics=metrics), method)
    # Ridges chosen by halves cost a dozen fits a trial, and what is tried is judged on other images anyway.
    fitted = replace(apart.moments, half=None, metrics=metrics)
    return Probe(
        model=dense.model,
        moments=fitted,
        method=method,
        inputs=apart.inputs,
        eliminations=eliminations_by_site,
        others=apart.few,
        loop=loop if loop is not None and apart.few.count >= loop.held_out_every else None,
    )


def probed_allocation(name: str, allocation: Allocation, effect: float) -> ProbedAllocation:
    """An allocation with the squared relative change of the outputs that it was seen to cause."""
    return ProbedAllocation(
        name=name, share=allocation.share, predicted_error=allocation.predicted_error, measured_error=effect**0.5
    )


def probed(name: str, probe: Probe, allocation: Allocation) -> ProbedAllocation:
    """Tried end to end."""
    return probed_allocation(name, allocation, probe.effect_of(probe.carried_out(allocation.widths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlanner:
    """All that a budget's plan follows from but its share: curves priced in one currency, made once for every share.

    `own`: the sites' curves in their own units, which any look at the outputs scales anew. `costs`: of a traced model,
    whose sites share layers, what widths save together. `total` is the dense model's cost in the unit of the curves'
    costs, `full_cost` that of one that merges no tokens, which shares are of. `merging_ms`: what merging alone takes,
    where latency counts and tokens are merged.
    """

    probe: Probe
    currency: Literal["macs", "params", "latency"]
    own: SiteCurves
    curves: list[CostCurve]
    total: int
    full_cost: int
    where: LatencyTarget | None
    merging_ms: float | None = None
    costs: SiteCosts | None = None

    def _planned(self, best: Allocation, share: float) -> WidthPlan:
        return WidthPlan(
            method=self.probe.method,
            widths=best.widths,
            decisions=(self._used(best, share), *left_alone(self.probe.model, best.widths)),
            predicted_speedup=1.0 / best.share if self.currency == "latency" else None,
            eliminations=self.probe.eliminations,
            metrics=self.probe.moments.metrics,
        )

    def _allocated(self, share: float, curves: list[CostCurve] | None = None) -> Allocation:
        """Curves of a traced model cost what they do at most: more is allowed until the widths use what was asked."""
        curves = self.curves if curves is None else curves
        if self.costs is None:
            return allocate(curves, self.total, share, full_cost=self.full_cost)
        least = self._narrowest()
        best, low, high = self._exactly(curves, max(share, least)), share, 1.0
        if best.share > share:  # biases are added where there are none
            best, low, high = self._exactly(curves, least), least, share
        if best.share > share:
            raise out_of_reach(curves, self.total, share, best.share, full_cost=self.full_cost)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            more = self._exactly(curves, max(middle, least))
            low, high, best = (middle, high, more) if more.share <= share else (low, middle, best)
        return best

    def _exactly(self, curves: list[CostCurve], share: float) -> Allocation:
        """Allocated by curves, with the share that the widths do use."""
        return self._used_by(allocate(curves, self.total, share * (1.0 + _ROUNDING), full_cost=self.full_cost))

    def _used_by(self, allocation: Allocation) -> Allocation:
        if self.costs is None:
            return allocation
        saved = self.costs.saved(sites_of(self.probe.model).every, allocation.widths)
        return replace(allocation, share=(self.total - saved) / self.full_cost)

    def widths_at(self, share: float) -> WidthPlan:
        """The widths of least predicted error that keep at most this share. Raises BadInput where none does."""
        return self._planned(self._allocated(share), share)

    def tried_at(self, share: float) -> WidthPlan:
        """Tried on the probe's images; uniform widths of the same budget, where there are any, are told beside them."""
        best = self._allocated(share)
        trials = [probed("by site", self.probe, best)]
        uniform = uniform_for_share(
            self.probe.model,
            self.probe.method,
            self.curves,
            self.total,
            share,
            full_cost=self.full_cost,
            used=self._used_by,
        )
        if uniform is not None:
            sparsity, allocated = uniform
            trials.append(probed(f"uniform sparsity {sparsity:.2f}", self.probe, allocated))
        return replace(self._planned(best, share), ways=tuple(trials))

    def narrowest(self) -> float:
        """The least share that any widths keep."""
        least = self._narrowest()
        return least if self.costs is None else self._exactly(self.curves, least).share

    def _narrowest(self) -> float:
        fixed = self.total - sum(curve.cost_now for curve in self.curves)
        return (fixed + sum(curve.costs[0] for curve in self.curves)) / self.full_cost

    def _used(self, best: Allocation, share: float) -> str:
        if self.where is None:
            return f"budget: {best.share:.1%} of the dense {self.currency} used of {share:.1%} allowed"
        used = (
            f"budget: {best.share:.1%} of the dense latency predicted of {share:.1%} allowed, which is "
            f"{best.share * self.full_cost / 1e6:.3f} of {self.full_cost / 1e6:.3f} ms at batch "
            f"{self.where.batches[0]} in {self.where.backend}"
        )
        merging = self.merging_ms
        return used if merging is None else f"{used}; merging tokens takes about {merging:.3f} ms of it, measured alone"


def _unmerged(dense: Checkpoint, currency: Currency) -> int:
    """The cost of the model were no tokens merged."""
    merges = traced_model.merging_of(dense.model) is not None
    return dense_cost(traced_model.with_merging(dense.model, None) if merges else dense.model, currency)


def budget_planner(
    dense: Checkpoint,
    moments: Moments,
    method: Method,
    images: InputSet,
    *,
    currency: Literal["macs", "params", "latency"],
    where: LatencyTarget | None = None,
    loop: Loop | None = None,
    watch: Stopwatch | None = None,
) -> BudgetPlanner:
    """Probe the sites and price their widths: one look at the images, and for latency the measured tables."""
    probe = probe_of(dense, moments, method, images, loop, watch)
    own = site_curves(probe)
    if currency != "latency":
        return BudgetPlanner(
            costs=site_costs(dense.model, currency),
            probe=probe,
            currency=currency,
            own=own,
            curves=cost_curves(probe, currency, curves=own),
            total=dense_cost(dense.model, currency),
            full_cost=_unmerged(dense, currency),
            where=None,
        )
    assert where is not None, currency
    tables = measure_tables(dense, method, where)
    batch = where.batches[0]
    curves, total = curves_in_time(cost_curves(probe, "macs", curves=own), tables, batch)
    full_cost = total if tables.all_tokens is None else round(1e6 * tables.model_ms(batch))
    merging_ms = tables.merging_ms(batch) if tables.merges else None
    return BudgetPlanner(
        probe=probe,
        currency=currency,
        own=own,
        curves=curves,
        total=total,
        full_cost=full_cost,
        where=where,
        merging_ms=merging_ms,
    )
