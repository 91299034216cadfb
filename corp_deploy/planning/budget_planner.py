"""Widths for every share of one budget, from one look at the images."""

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

from .budget import Allocation, allocate, out_of_reach, uniform_for_share
from .cost import cost_of_all_tokens, dense_cost
from .curves import CostCurve, SiteCurves, cost_curves, eliminations, site_curves, site_metrics
from .latency import curves_in_time, measure_tables
from .probe import Probe
from .probe_split import few_of, set_apart
from .request import LatencyTarget, ProbedAllocation, WidthPlan, left_alone

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
    with measure_effort(watch, "select"):
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


def probed(probe: Probe, allocations: Sequence[Allocation]) -> tuple[ProbedAllocation, ...]:
    """Each tried end to end."""
    return tuple(
        ProbedAllocation(
            name=each.name,
            share=each.share,
            predicted_error=each.predicted_error,
            measured_error=probe.effect_of(probe.carried_out(each.widths, merging=each.merging)) ** 0.5,
        )
        for each in allocations
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner(ABC):
    """All that a budget's plan follows from but its share, in one currency, made once for every share.

    `own`: the sites' curves in their own units, which any look at the outputs scales anew. `full_cost`: that of a model
    that merges no tokens, which shares are of; `where`: on what latency is measured.
    """

    probe: Probe
    own: SiteCurves
    currency: Currency
    full_cost: int
    where: LatencyTarget | None = None

    @abstractmethod
    def narrowest(self) -> float:
        """The least share within reach."""

    @abstractmethod
    def widths_at(self, share: float) -> WidthPlan:
        """What is predicted to lose the least and keeps at most this share. Raises BadInput where nothing does."""

    @abstractmethod
    def tried_at(self, share: float) -> WidthPlan:
        """The same, tried on the probe's images; what it was weighed against is told."""

    def _planned(self, best: Allocation, words: str, ways: tuple[ProbedAllocation, ...] = ()) -> WidthPlan:
        return WidthPlan(
            method=self.probe.method,
            widths=best.widths,
            decisions=(words, *left_alone(self.probe.model, best.widths)),
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
    """By widths alone: `curves` are priced in the currency, and `total` is the cost of the model as it merges tokens.

    `costs`: of a traced model, whose sites share layers, what widths save together. `merging_ms`: what merging alone
    takes, where latency counts and tokens are merged.
    """

    curves: list[CostCurve]
    total: int
    merging_ms: float | None = None
    costs: SiteCosts | None = None

    def widths_at(self, share: float) -> WidthPlan:
        best = self._allocated(share)
        return self._planned(best, self._words(best, share))

    def tried_at(self, share: float) -> WidthPlan:
        """Uniform widths of the same budget, where there are any, are told beside them."""
        best, probe = self._allocated(share), self.probe
        even = uniform_for_share(
            probe.model, probe.method, self.curves, self.total, share, full_cost=self.full_cost, used=self._used_by
        )
        return self._planned(best, self._words(best, share), probed(probe, [best] if even is None else [best, even[1]]))

    def narrowest(self) -> float:
        return self._least if self.costs is None else self._exactly(self._least).share

    @property
    def _least(self) -> float:
        """What the narrowest widths keep by the curves."""
        return (self.total - sum(curve.cost_now - curve.costs[0] for curve in self.curves)) / self.full_cost

    def _allocated(self, share: float) -> Allocation:
        """Curves of a traced model cost what they do at most: more is allowed until the widths use what was asked."""
        if self.costs is None:
            return allocate(self.curves, self.total, share, full_cost=self.full_cost)
        least = self._least
        best, low, high = self._exactly(max(share, least)), share, 1.0
        if best.share > share:  # biases are added where there are none
            best, low, high = self._exactly(least), least, share
        if best.share > share:
            raise out_of_reach(self.curves, self.total, share, best.share, full_cost=self.full_cost)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            more = self._exactly(max(middle, least))
            low, high, best = (middle, high, more) if more.share <= share else (low, middle, best)
        return best

    def _exactly(self, share: float) -> Allocation:
        """Allocated by curves, with the share that the widths do use."""
        return self._used_by(allocate(self.curves, self.total, share * (1.0 + _ROUNDING), full_cost=self.full_cost))

    def _used_by(self, allocation: Allocation) -> Allocation:
        if self.costs is None:
            return allocation
        saved = self.costs.saved(sites_of(self.probe.model).every, allocation.widths)
        return replace(allocation, share=(self.total - saved) / self.full_cost)

    def _words(self, best: Allocation, share: float) -> str:
        used, merging = self._used(best, share), self.merging_ms
        return used if merging is None else f"{used}; merging tokens takes about {merging:.3f} ms of it, measured alone"


def budget_planner(
    dense: Checkpoint,
    moments: Moments,
    method: Method,
    images: InputSet,
    *,
    currency: Currency,
    where: LatencyTarget | None = None,
    loop: Loop | None = None,
    watch: Stopwatch | None = None,
) -> BudgetPlanner:
    """Probe the sites and price their widths: one look at the images, and for latency the measured tables."""
    probe = probe_of(dense, moments, method, images, loop, watch)
    own = site_curves(probe)
    if currency != "latency":
        return BudgetPlanner(
            probe=probe,
            own=own,
            currency=currency,
            full_cost=cost_of_all_tokens(dense.model, currency),
            curves=cost_curves(probe, currency, curves=own),
            total=dense_cost(dense.model, currency),
            costs=site_costs(dense.model, currency),
        )
    assert where is not None, currency
    tables, batch = measure_tables(dense, method, where), where.batches[0]
    curves, total = curves_in_time(cost_curves(probe, "macs", curves=own), tables, batch)
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
