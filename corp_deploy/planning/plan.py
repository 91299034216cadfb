"""Settle what a reduction does before it is done: the widths of a budget, the geometry of the heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.widths import Widths
from corp_deploy.invocation.limit import Limit
from corp_deploy.invocation.merging import MergingChoice
from corp_deploy.polish.options import PolishOptions
from corp_deploy.reduction.method import LoopName, Method
from corp_deploy.reduction.read_tokens import Reads
from corp_deploy.store.checkpoint import Checkpoint
from ground.errors import BadInput

from .apart import set_apart
from .budget import Allocation, allocate, dense_cost, uniform_for_share
from .curves import CostCurve, cost_curves, eliminations
from .head_choice import choose_heads
from .latency import LatencyTarget, curves_in_time, measure_tables
from .probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A share of the dense model's MACs, parameters or latency that may stay, in (0, 1]; `where` tells latency's."""

    currency: Literal["macs", "params", "latency"]
    share: float
    where: LatencyTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinRequest:
    """What the smallest model must stay within, and what it is to be least in; `where` tells latency's."""

    limit: Limit
    currency: Literal["macs", "latency"] = "macs"
    where: LatencyTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """A reduction as a user asks for it; a budget, a limit, `auto_heads`, the closed loop, a polish and merged channels
    need images.

    `allow_partial` takes a model of which less is removed than the sparsities ask for; `reads` are the tokens that a
    closed loop's last block is fitted to, see tokens_to_fit; `merging`: which tokens are merged away.
    """

    preset: str
    method: Method
    budget: Budget | None = None
    within: WithinRequest | None = None
    auto_heads: bool = False
    closed_loop: LoopName | None = None
    allow_partial: bool = False
    reads: Reads | None = None
    polish: PolishOptions | None = None
    merging: MergingChoice = field(default_factory=MergingChoice)

    @property
    def needs_images(self) -> bool:
        planned = self.budget is not None or self.within is not None or self.auto_heads
        return planned or self.closed_loop is not None or self.polish is not None or self.method.merges


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAllocation:
    """An allocation of a budget: the share of the dense cost that stays, the relative logit error that the curves
    predict, and the one found on the images of the probe.
    """

    name: str
    share: float
    predicted_error: float
    measured_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthPlan:
    """Method and widths settled (None: uniform), with a sentence on each thing that was decided.

    `ways`: the one taken and those it was weighed against. `eliminations`: work that the reduction need not repeat.
    `within`: what was tried for a limit, as JSON values.
    """

    method: Method
    widths: Widths | None
    said: tuple[str, ...]
    predicted_speedup: float | None = None
    ways: tuple[ProbedAllocation, ...] = ()
    eliminations: Mapping[str, Elimination] | None = None
    within: Mapping[str, Any] | None = None


def _probe(dense: Checkpoint, moments: Moments, method: Method, images: InputSet) -> Probe:
    apart = set_apart(dense, moments, images)
    known = eliminations(dense.model, moments, method)
    return Probe(model=dense.model, moments=apart.moments, method=method, inputs=apart.inputs, eliminations=known)


def _probed(name: str, probe: Probe, allocation: Allocation) -> ProbedAllocation:
    measured = probe.effect(allocation.widths) ** 0.5
    return ProbedAllocation(
        name=name, share=allocation.share, predicted_error=allocation.predicted_error, measured_error=measured
    )


def _beside_uniform(
    probe: Probe, by_curves: Allocation, curves: list[CostCurve], dense: int, share: float
) -> tuple[ProbedAllocation, ...]:
    """The allocated widths and, where there are any, uniform ones of the same budget."""
    by_site = _probed("by site", probe, by_curves)
    uniform = uniform_for_share(probe.model, probe.method, curves, dense, share)
    if uniform is None:
        return (by_site,)
    sparsity, allocated = uniform
    return by_site, _probed(f"uniform sparsity {sparsity:.2f}", probe, allocated)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlanner:
    """All that a budget's plan follows from but its share: curves priced in one currency, made once for every share.

    `total` is the dense model's cost in the unit of the curves' costs.
    """

    probe: Probe
    currency: Literal["macs", "params", "latency"]
    curves: list[CostCurve]
    total: int
    where: LatencyTarget | None

    def widths_at(self, share: float) -> WidthPlan:
        """The widths of least predicted error that keep at most this share. Raises BadInput where none does."""
        best = allocate(self.curves, self.total, share)
        return WidthPlan(
            method=self.probe.method,
            widths=best.widths,
            said=(self._used(best, share),),
            predicted_speedup=1.0 / best.share if self.currency == "latency" else None,
            eliminations=self.probe.eliminations,
        )

    def beside_uniform(self, share: float) -> tuple[ProbedAllocation, ...]:
        """The allocated widths of a share and, where there are any, uniform ones, both tried on the probe's images."""
        best = allocate(self.curves, self.total, share)
        return _beside_uniform(self.probe, best, self.curves, self.total, share)

    def narrowest(self) -> float:
        """The least share that any widths keep."""
        fixed = self.total - sum(curve.cost_now for curve in self.curves)
        return (fixed + sum(curve.costs[0] for curve in self.curves)) / self.total

    def _used(self, best: Allocation, share: float) -> str:
        if self.where is None:
            return f"budget: {best.share:.1%} of the dense {self.currency} used of {share:.1%} allowed"
        return (
            f"budget: {best.share:.1%} of the dense latency predicted of {share:.1%} allowed, which is "
            f"{best.share * self.total / 1e6:.3f} of {self.total / 1e6:.3f} ms at batch {self.where.batches[0]} in "
            f"{self.where.backend}"
        )


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
    probe = _probe(dense, moments, method, images)
    if currency != "latency":
        curves, total = cost_curves(probe, currency), dense_cost(dense.model, currency)
        return BudgetPlanner(probe=probe, currency=currency, curves=curves, total=total, where=None)
    assert where is not None, currency
    tables = measure_tables(dense, method, where)
    curves, total = curves_in_time(cost_curves(probe, "macs"), tables, dense, where.batches[0])
    return BudgetPlanner(probe=probe, currency=currency, curves=curves, total=total, where=where)


def plan(dense: Checkpoint, moments: Moments, asked: ReductionRequest, images: InputSet | None) -> WidthPlan:
    """Settle geometry and widths. Raises BadInput when images are needed and missing."""
    if asked.needs_images and images is None:
        raise BadInput(
            "a budget, --within, --heads auto, --closed-loop, --polish and presets that merge channels (grail-fold, "
            "fold) look at the calibration images; give them with --images, or --text for a text encoder"
        )
    if images is None or not (asked.budget or asked.auto_heads):
        return WidthPlan(method=asked.method, widths=None, said=())
    if asked.auto_heads:
        if asked.budget is not None and asked.budget.currency != "macs":
            raise BadInput("--heads auto compares at equal MACs; expected --macs, or no budget")
        probe = _probe(dense, moments, asked.method, images)
        choice = choose_heads(probe, None if asked.budget is None else asked.budget.share)
        return WidthPlan(
            method=choice.method,
            widths=choice.allocated.widths,
            said=(choice.reason,),
            ways=tuple(_probed(name, probe, allocation) for name, allocation in choice.ways.items()),
            eliminations=probe.eliminations,
        )
    budget = asked.budget
    assert budget is not None, asked
    planner = budget_planner(dense, moments, asked.method, images, currency=budget.currency, where=budget.where)
    return replace(planner.widths_at(budget.share), ways=planner.beside_uniform(budget.share))
