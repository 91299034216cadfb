"""Merged tokens and widths for one budget together, for every share of it from one look at the images.

Schedules that leave 95, 90, 85, ... % of the cost are settled first (see schedule.py); what each loses is measured on
images from everywhere, as nothing is fitted to any. The widths then have what the schedule leaves of the budget, at
the tokens that it leaves, and both errors add. The best of these sums are tried end to end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.spec.merging import Merging, Metric
from corp_deploy.store.checkpoint import Checkpoint
from ground.effort import Stopwatch
from ground.errors import BadInput

from .budget import Allocation, allocate
from .budget_planner import Planner, probe_of, probed
from .curves import CostCurve, cost_curves, output_errors, site_curves
from .merge_curves import MergeCurves, merge_curves
from .merge_prices import Prices, measure_merge_latencies, prices_by_latencies, prices_in_macs
from .probe import Probe
from .probe_split import IMAGES, few_of
from .request import ReductionRequest, WidthPlan, merging_of_schedule
from .schedule import Schedule, best_schedule, shaped_schedule, shapes

GRID = 0.05
TRIED = 2
ABOUT = 1.1  # times the least error


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One schedule, or none: its squared relative error alone, the curves at the tokens left, the whole cost then."""

    merging: Merging | None
    lost: float
    curves: list[CostCurve]
    cost: int

    @property
    def least(self) -> int:
        """What the narrowest widths cost."""
        return self.cost - sum(curve.cost_now - min(curve.costs) for curve in self.curves)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlanner(Planner):
    """`merging` makes a schedule's merging; `metrics`: those that what is settled is tried with beside its own.

    `unfitted` looks at inputs from everywhere, for what is merged without a fit; those of `probe` no fit has seen.
    `stages` are those settled so far, by the share that merging alone keeps.
    """

    unfitted: Probe
    merging: Callable[[tuple[int, ...]], Merging]
    losses: MergeCurves
    prices: Prices
    metrics: tuple[Metric, ...] = ()
    stages: dict[int, Stage | None] = field(default_factory=dict)

    def widths_at(self, share: float) -> WidthPlan:
        return self._named(self.ranked(share)[0], share)

    def tried_at(self, share: float) -> WidthPlan:
        """The best on the probe's images of those predicted best, and of its widths allocated again; all are told."""
        ways = self.ranked(share)[:TRIED]
        trials = probed(self.probe, ways)
        errors = [trial.measured_error for trial in trials]
        if again := self._again(ways[errors.index(min(errors))], share):
            ways, trials = [*ways, again], (*trials, *probed(self.probe, [again]))
        errors = [trial.measured_error for trial in trials]
        return replace(self._named(ways[errors.index(min(errors))], share), ways=trials)

    def narrowest(self) -> float:
        """About that: with as many tokens merged as a schedule of the grid can."""
        step = 0
        while self._schedules(step + 1):
            step += 1
        stage = self._stage(step)
        assert stage is not None, step
        return stage.least / self.full_cost

    def ranked(self, share: float) -> list[Allocation]:
        """Every schedule that leaves more than the share, with widths for the rest, the least error predicted first.
        Raises BadInput where nothing keeps so little.
        """
        stages = [self._stage(step) for step in range(int((1.0 - share) / GRID + 1e-9) + 1)]
        within = [stage for stage in stages if stage is not None and stage.least <= share * self.full_cost]
        if not within:
            raise BadInput(
                f"a budget of {share:g} is out of reach: the narrowest widths and {self.losses.amounts_G[-1]} of "
                f"{self.losses.tokens} tokens merged away keep {self.narrowest():.3f}; ask for more"
            )
        return sorted((self._allocated(stage, share) for stage in within), key=lambda way: way.predicted_error)

    def _named(self, way: Allocation, share: float) -> WidthPlan:
        return self._planned(way, f"{self._used(way, share)}, {way.name}")

    def _allocated(self, stage: Stage, share: float) -> Allocation:
        widths = allocate(stage.curves, stage.cost, share, full_cost=self.full_cost)
        return replace(
            widths,
            merging=stage.merging,
            predicted_error=(stage.lost + widths.predicted_error**2) ** 0.5,
            name="widths alone" if stage.merging is None else f"tokens {stage.merging.describe()}, and widths",
        )

    def _again(self, way: Allocation, share: float) -> Allocation | None:
        """The same schedule, widths by what sites lose where tokens are merged so; None where those are the same."""
        (stage,) = (each for each in self.stages.values() if each is not None and each.merging == way.merging)
        probe = self.probe.few
        if way.merging is not None:
            with torch.inference_mode(False), torch.no_grad():  # gradients go through it
                probe = replace(probe, model=traced_model.with_merging(probe.model, way.merging))
        errors = output_errors(probe, self.own)
        curves = [replace(curve, errors=errors[curve.site]) for curve in stage.curves]
        again = self._allocated(replace(stage, curves=curves), share)
        return None if again.widths == way.widths else replace(again, name=f"{again.name}, allocated again")

    def _stage(self, step: int) -> Stage | None:
        """The schedule that leaves 1 - step * GRID of the cost; None where none does."""
        if step not in self.stages:
            self.stages[step] = self._settled(step)
        return self.stages[step]

    def _schedules(self, step: int) -> list[Schedule]:
        """Those that leave 1 - step * GRID of the cost: plain ones, the latest first, and the curves' best."""
        limit = (1.0 - step * GRID) * self.full_cost
        losses, costs = self.losses, self.prices.costs
        plain = [shaped_schedule(losses, costs, limit, shape) for shape in shapes(len(losses.errors_LG))]
        settled = (*plain, best_schedule(losses, costs, limit))
        return list({schedule.counts: schedule for schedule in settled if schedule is not None}.values())

    def _settled(self, step: int) -> Stage | None:
        model = self.probe.model
        if step == 0:
            curves, cost = self.prices.priced(model)
            return Stage(merging=None, lost=0.0, curves=curves, cost=cost)
        mergings = [self.merging(schedule.counts) for schedule in self._schedules(step)]
        if not mergings:
            return None
        # Sums of first-order losses mistake large merges for cheap ones: what is taken must be good as measured. Of
        # those about as good the plain one that merges latest: on other images early and uneven merges lose more.
        lost = [self._lost(merging) for merging in mergings]
        best = next(place for place, each in enumerate(lost) if each <= ABOUT**2 * min(lost))
        others = (replace(mergings[best], metric=metric) for metric in self.metrics)
        ways = [(lost[best], mergings[best]), *((self._lost(other), other) for other in others)]
        least, merging = min(ways, key=lambda way: way[0])
        curves, cost = self.prices.priced(traced_model.with_merging(model, merging))
        return Stage(merging=merging, lost=least, curves=curves, cost=cost)

    def _lost(self, merging: Merging) -> float:
        return self.unfitted.effect_of(traced_model.with_merging(self.probe.model, merging))


def _metrics_beside(model: nn.Module, choice: MergedStatistics) -> tuple[Metric, ...]:
    """Those tried beside the one asked for: the class token's attention beside the default, where a model has it."""
    if choice.merge_metric != "ward":
        return ()
    try:
        traced_model.with_merging(model, Merging(schedule=(1,) * traced_model.depth(model), metric="attended"))
    except BadInput:
        return ()
    return ("attended",)


def joint_planner(
    dense: Checkpoint,
    moments: Moments,
    request: ReductionRequest,
    images: InputSet,
    *,
    watch: Stopwatch | None = None,
) -> JointPlanner:
    """Learn what merging and narrower sites lose, and what they cost: one look at the images, and for latency a few
    dozen timings. Raises BadInput for a model that can't merge, and for budgets of parameters.
    """
    if refusal := traced_model.merging_refusal(dense.model):
        raise BadInput(f"--merge-tokens auto: {refusal}; leave it out")
    currency, where = request.priced_in, request.where
    if currency == "params":
        why = "merging keeps every parameter, so that --params can't weigh it; give --macs or --latency"
        raise BadInput(f"--merge-tokens auto: {why}")
    probe = probe_of(dense, moments, request.method, images, request.loop(moments), watch)
    own = site_curves(probe)
    unfitted = replace(probe, inputs=few_of(dense, images, IMAGES))
    curves, losses = cost_curves(probe, "macs", curves=own), merge_curves(probe.model, unfitted.inputs)
    if currency == "latency":
        assert where is not None, currency
        prices = prices_by_latencies(dense, curves, losses, measure_merge_latencies(dense, probe.method, losses, where))
    else:
        where, prices = None, prices_in_macs(probe.model, curves, losses)
    return JointPlanner(
        probe=probe,
        own=own,
        currency=currency,
        full_cost=prices.full_cost,
        where=where,
        unfitted=unfitted,
        merging=partial(merging_of_schedule, request.options),
        losses=losses,
        prices=prices,
        metrics=_metrics_beside(dense.model, request.options),
    )
