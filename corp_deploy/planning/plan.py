"""Settle what a reduction does before it is done: the widths of a budget, the geometry of the heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.family import family_of
from corp_deploy.families.merging import Merging
from corp_deploy.families.site import Currency
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
from .joint import TRIED, Joint, JointAllocation, joint
from .latency import LatencyTarget, curves_in_time, measure_tables
from .merging import merging_of_schedule
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
    `within`: what was tried for a limit, as JSON values. `merging`: what a budget chose to merge away.
    """

    method: Method
    widths: Widths | None
    said: tuple[str, ...]
    predicted_speedup: float | None = None
    ways: tuple[ProbedAllocation, ...] = ()
    eliminations: Mapping[str, Elimination] | None = None
    within: Mapping[str, Any] | None = None
    merging: Merging | None = None


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
    probe: Probe, by_curves: Allocation, curves: list[CostCurve], dense: int, share: float, whole: int
) -> tuple[ProbedAllocation, ...]:
    """The allocated widths and, where there are any, uniform ones of the same budget."""
    by_site = _probed("by site", probe, by_curves)
    uniform = uniform_for_share(probe.model, probe.method, curves, dense, share, whole=whole)
    if uniform is None:
        return (by_site,)
    sparsity, allocated = uniform
    return by_site, _probed(f"uniform sparsity {sparsity:.2f}", probe, allocated)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlanner:
    """What BudgetPlanner is, for a budget that chooses which tokens are merged away too."""

    joint: Joint

    @property
    def probe(self) -> Probe:
        return self.joint.probe

    def narrowest(self) -> float:
        """About the least share that is within reach."""
        return self.joint.narrowest()

    def _planned(self, way: JointAllocation, share: float) -> WidthPlan:
        return WidthPlan(
            method=self.probe.method,
            widths=way.allocated.widths,
            said=(f"budget: {way.allocated.share:.1%} of the dense macs used of {share:.1%} allowed, {way.words()}",),
            eliminations=self.probe.eliminations,
            merging=way.merging,
        )

    def widths_at(self, share: float) -> WidthPlan:
        """The schedule and the widths of least predicted error. Raises BadInput where nothing keeps so little."""
        return self._planned(self.joint.ranked(share)[0], share)

    def tried_at(self, share: float) -> WidthPlan:
        """The best on the probe's images of those that were predicted to be the best, all of which are told."""
        ways = self.joint.ranked(share)[:TRIED]
        errors = [self.joint.measured(way) for way in ways]
        told = tuple(
            ProbedAllocation(
                name=way.words(),
                share=way.allocated.share,
                predicted_error=way.allocated.predicted_error,
                measured_error=error,
            )
            for way, error in zip(ways, errors, strict=True)
        )
        return replace(self._planned(ways[errors.index(min(errors))], share), ways=told)


def joint_planner(
    dense: Checkpoint, moments: Moments, asked: ReductionRequest, images: InputSet, currency: str
) -> JointPlanner:
    """Learn what merging and narrower sites lose. Raises BadInput for a model that can't merge, and for other budgets
    than of MACs.
    """
    if refusal := family_of(dense.model).merging_refusal(dense.model):
        raise BadInput(f"--merge-tokens auto: {refusal}; leave it away")
    if currency != "macs":
        why = "merging keeps every parameter" if currency == "params" else "only a given schedule's tokens are timed"
        raise BadInput(f"--merge-tokens auto: {why}, so that --{currency} can't weigh it; give --macs")
    probe = _probe(dense, moments, asked.method, images)
    return JointPlanner(joint=joint(probe, cost_curves(probe, "macs"), partial(merging_of_schedule, asked.merging)))


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


def plan(dense: Checkpoint, moments: Moments, asked: ReductionRequest, images: InputSet | None) -> WidthPlan:
    """Settle geometry and widths. Raises BadInput when images are needed and missing."""
    if asked.merging.is_auto and (asked.budget is None or asked.auto_heads):
        raise BadInput(
            "--merge-tokens auto chooses for a budget what each block merges away; give --macs (without --heads auto) "
            "or --within, or say how many tokens: 12 in each block, grow:36"
        )
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
    if asked.merging.is_auto:
        return joint_planner(dense, moments, asked, images, budget.currency).tried_at(budget.share)
    planner = budget_planner(dense, moments, asked.method, images, currency=budget.currency, where=budget.where)
    return replace(planner.widths_at(budget.share), ways=planner.beside_uniform(budget.share))
