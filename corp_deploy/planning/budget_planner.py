"""Widths for every share of one budget, from one look at the images."""

from dataclasses import dataclass
from typing import Literal

from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.families.family import family_of
from corp_deploy.families.site import Currency
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint

from .apart import set_apart
from .budget import Allocation, allocate, dense_cost, uniform_for_share
from .curves import CostCurve, cost_curves, eliminations
from .latency import LatencyTarget, curves_in_time, measure_tables
from .probe import Probe
from .width_plan import ProbedAllocation, WidthPlan


def probe_of(dense: Checkpoint, moments: Moments, method: Method, images: InputSet) -> Probe:
    apart = set_apart(dense, moments, images)
    known = eliminations(dense.model, moments, method)
    return Probe(model=dense.model, moments=apart.moments, method=method, inputs=apart.inputs, eliminations=known)


def probed(name: str, probe: Probe, allocation: Allocation) -> ProbedAllocation:
    measured = probe.effect(allocation.widths) ** 0.5
    return ProbedAllocation(
        name=name, share=allocation.share, predicted_error=allocation.predicted_error, measured_error=measured
    )


def _beside_uniform(
    probe: Probe, by_curves: Allocation, curves: list[CostCurve], dense: int, share: float, whole: int
) -> tuple[ProbedAllocation, ...]:
    """The allocated widths and, where there are any, uniform ones of the same budget."""
    by_site = probed("by site", probe, by_curves)
    uniform = uniform_for_share(probe.model, probe.method, curves, dense, share, whole=whole)
    if uniform is None:
        return (by_site,)
    sparsity, allocated = uniform
    return by_site, probed(f"uniform sparsity {sparsity:.2f}", probe, allocated)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlanner:
    """All that a budget's plan follows from but its share: curves priced in one currency, made once for every share.

    `total` is the dense model's cost in the unit of the curves' costs, `whole` that of one that merges no tokens, which
    shares are of. `merging_ms`: what merging alone takes, where latency counts and tokens are merged.
    """

    probe: Probe
    currency: Literal["macs", "params", "latency"]
    curves: list[CostCurve]
    total: int
    whole: int
    where: LatencyTarget | None
    merging_ms: float | None = None

    def widths_at(self, share: float) -> WidthPlan:
        """The widths of least predicted error that keep at most this share. Raises BadInput where none does."""
        best = allocate(self.curves, self.total, share, whole=self.whole)
        return WidthPlan(
            method=self.probe.method,
            widths=best.widths,
            said=(self._used(best, share),),
            predicted_speedup=1.0 / best.share if self.currency == "latency" else None,
            eliminations=self.probe.eliminations,
        )

    def beside_uniform(self, share: float) -> tuple[ProbedAllocation, ...]:
        """The allocated widths of a share and, where there are any, uniform ones, both tried on the probe's images."""
        best = allocate(self.curves, self.total, share, whole=self.whole)
        return _beside_uniform(self.probe, best, self.curves, self.total, share, self.whole)

    def narrowest(self) -> float:
        """The least share that any widths keep."""
        fixed = self.total - sum(curve.cost_now for curve in self.curves)
        return (fixed + sum(curve.costs[0] for curve in self.curves)) / self.whole

    def _used(self, best: Allocation, share: float) -> str:
        if self.where is None:
            return f"budget: {best.share:.1%} of the dense {self.currency} used of {share:.1%} allowed"
        used = (
            f"budget: {best.share:.1%} of the dense latency predicted of {share:.1%} allowed, which is "
            f"{best.share * self.whole / 1e6:.3f} of {self.whole / 1e6:.3f} ms at batch {self.where.batches[0]} in "
            f"{self.where.backend}"
        )
        merging = self.merging_ms
        return used if merging is None else f"{used}; merging tokens takes about {merging:.3f} ms of it, measured alone"


def _unmerged(dense: Checkpoint, currency: Currency) -> int:
    """The cost of the model were no tokens merged."""
    family = family_of(dense.model)
    merges = family.merging_of(dense.model) is not None
    return dense_cost(family.with_merging(dense.model, None) if merges else dense.model, currency)


def budget_planner(
    dense: Checkpoint,
    moments: Moments,
    method: Method,
    images: InputSet,
    *,
    currency: Literal["macs", "params", "latency"],
    where: LatencyTarget | None = None,
) -> BudgetPlanner:
    """Probe the sites and price their widths: one look at the images, and for latency the measured tables."""
    probe = probe_of(dense, moments, method, images)
    if currency != "latency":
        curves, total = cost_curves(probe, currency), dense_cost(dense.model, currency)
        return BudgetPlanner(
            probe=probe, currency=currency, curves=curves, total=total, whole=_unmerged(dense, currency), where=None
        )
    assert where is not None, currency
    tables = measure_tables(dense, method, where)
    batch = where.batches[0]
    curves, total = curves_in_time(cost_curves(probe, "macs"), tables, dense, batch)
    whole = total if tables.all_tokens is None else round(1e6 * tables.whole_ms(batch))
    merging_ms = tables.merging_ms(batch) if tables.merges else None
    return BudgetPlanner(
        probe=probe, currency=currency, curves=curves, total=total, whole=whole, where=where, merging_ms=merging_ms
    )
