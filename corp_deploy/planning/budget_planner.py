"""Probes of budgets, and planners: a plan for any share of the cost, by error and cost curves computed once."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families.counting import SiteCosts, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.budget_choice import Currency
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from ground.effort import Stopwatch, measure_effort

from .budget import Allocation, allocate_widths, find_uniform_for_share, unreachable_budget
from .curves import (
    CostCurve,
    SiteCurves,
    compute_cost_curves,
    compute_eliminations,
    compute_site_curves,
    compute_site_metrics,
)
from .first_plan import cost_of_all_tokens, dense_cost
from .latency import measure_tables, price_in_time
from .probe import Probe
from .probe_split import draw_inputs, set_apart
from .request import LatencyTarget, ProbedAllocation, ReductionRequest, WidthPlan, sentences_on_spared

_ROUNDING = 1e-12
_HALVINGS = 8
"""Bisection steps towards the largest budget by the curves whose widths, exactly priced, meet the asked budget."""


def build_probe(
    dense: Checkpoint,
    moments: Moments,
    method: Method,
    images: InputSet,
    loop: Loop | None = None,
    watch: Stopwatch | None = None,
) -> Probe:
    """Return the probe of a budget: images set apart, moments without them, and every site's order of removal.

    With a `loop`, and enough other images to fit it to, the probe measures widths on models from that closed loop.
    """
    apart = set_apart(dense, moments, images)
    metrics = compute_site_metrics(dense.model, method, draw_inputs(dense, apart.loop_images))
    with measure_effort(watch, "select"):
        eliminations_by_site = compute_eliminations(dense.model, replace(moments, metrics=metrics), method)
    # Choosing ridges by halves takes a dozen fits per trial, and other images judge the trials anyway.
    fitted = replace(apart.moments, half=None, metrics=metrics)
    return Probe(
        model=dense.model,
        moments=fitted,
        method=method,
        inputs=apart.inputs,
        eliminations=eliminations_by_site,
        others=apart.loop_images,
        loop=loop if loop is not None and apart.loop_images.count >= loop.held_out_every else None,
    )


def probe_allocations(probe: Probe, allocations: Sequence[Allocation]) -> tuple[ProbedAllocation, ...]:
    """Return each allocation with its relative output error as measured on the probe's images."""

    def probed(each: Allocation) -> ProbedAllocation:
        effects = probe.effects_over_inputs(probe.carried_out(each.widths, merging=each.merging))
        return ProbedAllocation(
            name=each.name,
            share=each.share,
            predicted_error=each.predicted_error,
            measured_error=effects.mean**0.5,
            median_error=effects.median**0.5,
        )

    return tuple(map(probed, allocations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner(ABC):
    """A budget's probe, curves and costs, from which plans for any share are made.

    `own` holds the sites' error curves in their own units. Shares refer to `full_cost`, the cost of the model without
    token merging; `where` says how latency is measured, None if another cost counts.
    """

    probe: Probe
    own: SiteCurves
    currency: Currency
    full_cost: int
    where: LatencyTarget | None = None

    @abstractmethod
    def narrowest(self) -> float:
        """Return the smallest share of the cost that any plan keeps."""

    @abstractmethod
    def widths_at(self, share: float) -> WidthPlan:
        """Return the plan of least predicted error that keeps at most this share.

        Raises BadInput if no plan keeps so little.
        """

    @abstractmethod
    def tried_at(self, share: float) -> WidthPlan:
        """Return the plan for this share, with its error and that of alternatives measured on the probe's images."""

    def _planned(self, best: Allocation, words: str, ways: tuple[ProbedAllocation, ...] = ()) -> WidthPlan:
        return WidthPlan(
            method=self.probe.method,
            widths=best.widths,
            decisions=(words, *sentences_on_spared(self.probe.model, best.widths)),
            predicted_speedup=1.0 / best.share if self.currency == "latency" else None,
            ways=ways,
            eliminations=self.probe.eliminations,
            metrics=self.probe.moments.metrics,
            merging=best.merging,
        )

    def _used(self, best: Allocation, share: float) -> str:
        if self.where is None:
            return f"budget: {best.share:.1%} of the dense {self.currency} used of {share:.1%} allowed"
        return (
            f"budget: {best.share:.1%} of the dense latency predicted of {share:.1%} allowed, which is "
            f"{best.share * self.full_cost / 1e6:.3f} of {self.full_cost / 1e6:.3f} ms at batch "
            f"{self.where.batches[0]} in {self.where.backend}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlanner(Planner):
    """A planner that chooses widths alone.

    `curves` are priced in the currency, and `total` is the cost of the model with its token merging, if any. `costs`
    computes the exact saving of all sites' widths together, as sites share layers; it is None for latency. If latency
    counts and the model merges tokens, `merging_ms` is the time of the merges alone.
    """

    curves: list[CostCurve]
    total: int
    merging_ms: float | None = None
    costs: SiteCosts | None = None

    def widths_at(self, share: float) -> WidthPlan:
        best = self._allocated(share)
        return self._planned(best, self._described(best, share))

    def tried_at(self, share: float) -> WidthPlan:
        """Return the plan for this share with its measured error, beside uniform widths of the same budget."""
        best, probe = self._allocated(share), self.probe
        even = find_uniform_for_share(
            probe.model, probe.method, self.curves, self.total, share, full_cost=self.full_cost, used=self._used_by
        )
        return self._planned(
            best, self._described(best, share), probe_allocations(probe, [best] if even is None else [best, even])
        )

    def narrowest(self) -> float:
        return self._least if self.costs is None else self._exactly(self._least).share

    @property
    def _least(self) -> float:
        """The share that the narrowest widths keep according to the curves."""
        return (self.total - sum(curve.cost_now - curve.costs[0] for curve in self.curves)) / self.full_cost

    def _allocated(self, share: float) -> Allocation:
        """Return the allocation of least predicted error whose exact share is at most `share`.

        Curves overestimate the cost of sites that share layers. So bisection finds the largest budget by the curves for
        which the exact cost of the chosen widths is at most `share`. Raises BadInput if no widths keep so little.
        """
        if self.costs is None:
            return allocate_widths(self.curves, self.total, share, full_cost=self.full_cost)
        least = self._least
        best, low, high = self._exactly(max(share, least)), share, 1.0
        if best.share > share:  # narrowing adds biases, which the curves leave out
            best, low, high = self._exactly(least), least, share
        if best.share > share:
            raise unreachable_budget(self.curves, self.total, share, best.share, full_cost=self.full_cost)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            more = self._exactly(max(middle, least))
            low, high, best = (middle, high, more) if more.share <= share else (low, middle, best)
        return best

    def _exactly(self, share: float) -> Allocation:
        """Return the allocation that the curves choose for a budget, with the exact share of its widths."""
        rounded_up = share * (1.0 + _ROUNDING)
        return self._used_by(allocate_widths(self.curves, self.total, rounded_up, full_cost=self.full_cost))

    def _used_by(self, allocation: Allocation) -> Allocation:
        if self.costs is None:
            return allocation
        saved = self.costs.saved(sites_of(self.probe.model).every, allocation.widths)
        return replace(allocation, share=(self.total - saved) / self.full_cost)

    def _described(self, best: Allocation, share: float) -> str:
        used, merging = self._used(best, share), self.merging_ms
        return used if merging is None else f"{used}; merging tokens takes about {merging:.3f} ms of it, measured alone"


def build_budget_planner(
    dense: Checkpoint, moments: Moments, request: ReductionRequest, images: InputSet, watch: Stopwatch | None = None
) -> BudgetPlanner:
    """Return a planner with the sites' measured error curves, priced in the currency that the request counts."""
    probe = build_probe(dense, moments, request.method, images, request.loop(moments), watch)
    own, currency, where = compute_site_curves(probe), request.priced_in, request.where
    if currency != "latency":
        return BudgetPlanner(
            probe=probe,
            own=own,
            currency=currency,
            full_cost=cost_of_all_tokens(dense.model, currency),
            curves=compute_cost_curves(probe, currency, curves=own),
            total=dense_cost(dense.model, currency),
            costs=site_costs(dense.model, currency),
        )
    assert where is not None, currency
    tables, batch = measure_tables(dense, request.method, where), where.batches[0]
    curves, total = price_in_time(compute_cost_curves(probe, "macs", curves=own), tables, batch)
    return BudgetPlanner(
        probe=probe,
        own=own,
        currency=currency,
        full_cost=total if tables.all_tokens is None else round(1e6 * tables.model_ms(batch)),
        where=where,
        curves=curves,
        total=total,
        merging_ms=tables.merging_ms(batch) if tables.merges else None,
    )
