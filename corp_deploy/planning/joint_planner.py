"""A planner that chooses merged tokens and widths together for any share of one budget.

It first chooses merging schedules that leave 95, 90, 85, ... % of the cost (see schedule.py) and measures the error of
each on images from the whole set, since merging is fitted to none. The widths then take the rest of the budget, with
costs at the tokens that remain, and squared errors add up. The plans of least predicted error are measured on whole
models. Measured errors are compared by the geometric mean of that of all images together, which a few images can
decide, and that of the median image.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
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

from .budget import Allocation, allocate_widths
from .budget_planner import Planner, build_probe, probe_allocations
from .curves import CostCurve, compute_cost_curves, compute_site_curves, measure_output_errors
from .merge_curves import MergeCurves, compute_merge_curves
from .merge_prices import Prices, measure_merge_latencies, prices_by_latencies, prices_in_macs
from .probe import InputEffects, Probe
from .probe_split import IMAGES, draw_inputs
from .request import ReductionRequest, WidthPlan, merging_of_schedule
from .schedule import Schedule, find_best_schedule, find_shaped_schedule, plain_shapes

GRID = 0.05
TRIED = 2
ABOUT = 1.1  # schedules with up to so many times the least error count as equally good


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMerging:
    """A merging of tokens, or none, with what it loses and costs.

    `lost` is the squared relative output error of the merging alone. `curves` are the sites' curves with the tokens
    that are left, and `cost` is the cost of the model that merges, at its present widths.
    """

    merging: Merging | None
    lost: InputEffects
    curves: list[CostCurve]
    cost: int

    @property
    def least(self) -> int:
        """The cost with every site at its cheapest width."""
        return self.cost - sum(curve.cost_now - min(curve.costs) for curve in self.curves)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlanner(Planner):
    """A planner that chooses merged tokens and widths together.

    `unfitted` is the probe with inputs drawn from all images; it measures merging, which is fitted to no image. The
    inputs of `probe` are in no fit. `merging` makes the merging of a schedule, `losses` are the curves of its error,
    and `metrics` are further similarity metrics to try. `priced` caches the chosen mergings by step of GRID.
    """

    unfitted: Probe
    merging: Callable[[tuple[int, ...]], Merging]
    losses: MergeCurves
    prices: Prices
    metrics: tuple[Metric, ...] = ()
    priced: dict[int, PricedMerging | None] = field(default_factory=dict)

    def widths_at(self, share: float) -> WidthPlan:
        return self._named(self.ranked(share)[0], share)

    def tried_at(self, share: float) -> WidthPlan:
        """Measure the TRIED plans of least predicted error, allocate the best's widths again, and return the best."""
        ways = self.ranked(share)[:TRIED]
        trials = probe_allocations(self.probe, ways)
        best = min(range(len(trials)), key=lambda at: trials[at].error)
        if again := self._reallocated(ways[best], share):
            ways, trials = [*ways, again], (*trials, *probe_allocations(self.probe, [again]))
            best = min(range(len(trials)), key=lambda at: trials[at].error)
        return replace(self._named(ways[best], share), ways=trials)

    def narrowest(self) -> float:
        """Return the share of the cost that the cheapest widths keep with the merging of the grid's last step."""
        step = 0
        while self._schedules(step + 1):
            step += 1
        most_merged = self._priced_merging(step)
        assert most_merged is not None, step
        return most_merged.least / self.full_cost

    def ranked(self, share: float) -> list[Allocation]:
        """Return an allocation of `share` for the merging at every step of GRID above it, least predicted error first.

        Raises BadInput if no schedule and widths keep so little.
        """
        found = [self._priced_merging(step) for step in range(int((1.0 - share) / GRID + 1e-9) + 1)]
        within = [each for each in found if each is not None and each.least <= share * self.full_cost]
        if not within:
            raise BadInput(
                f"a budget of {share:g} is out of reach: the narrowest widths and {self.losses.amounts_G[-1]} of "
                f"{self.losses.tokens} tokens merged away keep {self.narrowest():.3f}; raise the budget"
            )
        return sorted((self._allocated(each, share) for each in within), key=lambda way: way.predicted_error)

    def _named(self, way: Allocation, share: float) -> WidthPlan:
        words = f"{self._used(way, share)}, {way.name}"
        if way.merging is not None:
            mean, median = (each**0.5 for each in astuple(self._priced_of(way).lost))
            words = f"{words}; merging alone errs {mean:.3f}, on the median image {median:.3f}"
        return self._planned(way, words)

    def _priced_of(self, way: Allocation) -> PricedMerging:
        return next(each for each in self.priced.values() if each is not None and each.merging == way.merging)

    def _allocated(self, priced: PricedMerging, share: float) -> Allocation:
        widths = allocate_widths(priced.curves, priced.cost, share, full_cost=self.full_cost)
        return replace(
            widths,
            merging=priced.merging,
            predicted_error=(priced.lost.mean + widths.predicted_error**2) ** 0.5,
            name="widths alone" if priced.merging is None else f"tokens {priced.merging.describe()}, and widths",
        )

    def _reallocated(self, way: Allocation, share: float) -> Allocation | None:
        """Allocate the widths again by errors measured with this merging; return None if that changes no width."""
        priced = self._priced_of(way)
        probe = self.probe.on_few_inputs
        if way.merging is not None:
            with torch.inference_mode(False), torch.no_grad():  # gradients go through it
                probe = replace(probe, model=traced_model.with_merging(probe.model, way.merging))
        errors = measure_output_errors(probe, self.own)
        curves = [replace(curve, errors=errors[curve.site]) for curve in priced.curves]
        again = self._allocated(replace(priced, curves=curves), share)
        return None if again.widths == way.widths else replace(again, name=f"{again.name}, allocated again")

    def _priced_merging(self, step: int) -> PricedMerging | None:
        """Return the best merging that leaves at most 1 - step * GRID of the cost, or None if none does."""
        if step not in self.priced:
            self.priced[step] = self._best_merging(step)
        return self.priced[step]

    def _schedules(self, step: int) -> list[Schedule]:
        """List schedules that leave at most 1 - step * GRID of the cost: plain shapes, then the best by the curves."""
        limit = (1.0 - step * GRID) * self.full_cost
        losses, costs = self.losses, self.prices.costs
        plain = [find_shaped_schedule(losses, costs, limit, shape) for shape in plain_shapes(len(losses.errors_LG))]
        settled = (*plain, find_best_schedule(losses, costs, limit))
        return list({schedule.counts: schedule for schedule in settled if schedule is not None}.values())

    def _best_merging(self, step: int) -> PricedMerging | None:
        model = self.probe.model
        if step == 0:
            curves, cost = self.prices.priced(model)
            return PricedMerging(merging=None, lost=InputEffects(mean=0.0, median=0.0), curves=curves, cost=cost)
        mergings = [self.merging(schedule.counts) for schedule in self._schedules(step)]
        if not mergings:
            return None
        # First-order losses underestimate large merges, so the measured error decides. Among schedules with about the
        # same error the plain one that merges latest wins: on other images early and uneven merges lose more.
        lost = [self._lost(merging) for merging in mergings]
        least = min(each.both for each in lost)
        best = next(place for place, each in enumerate(lost) if each.both <= ABOUT**2 * least)
        others = (replace(mergings[best], metric=metric) for metric in self.metrics)
        ways = [(lost[best], mergings[best]), *((self._lost(other), other) for other in others)]
        loses, merging = min(ways, key=lambda way: way[0].both)
        curves, cost = self.prices.priced(traced_model.with_merging(model, merging))
        return PricedMerging(merging=merging, lost=loses, curves=curves, cost=cost)

    def _lost(self, merging: Merging) -> InputEffects:
        return self.unfitted.effects_over_inputs(traced_model.with_merging(self.probe.model, merging))


def _metrics_beside(model: nn.Module, choice: MergedStatistics) -> tuple[Metric, ...]:
    """Return ("attended",), the class token's attention, if the default metric is chosen and the model has it."""
    if choice.merge_metric != "ward":
        return ()
    try:
        traced_model.with_merging(model, Merging(schedule=(1,) * traced_model.depth(model), metric="attended"))
    except BadInput:
        return ()
    return ("attended",)


def build_joint_planner(
    dense: Checkpoint, moments: Moments, request: ReductionRequest, images: InputSet, watch: Stopwatch | None = None
) -> JointPlanner:
    """Return a planner that has probed the losses of merging and of narrower sites, and priced both.

    Raises BadInput if the model can't merge tokens, or the budget counts parameters.
    """
    if refusal := traced_model.merging_refusal(dense.model):
        raise BadInput(f"--merge-tokens auto: {refusal}; leave it out")
    currency, where = request.priced_in, request.where
    if currency == "params":
        why = "merging keeps every parameter, so that --params can't weigh it; give --macs or --latency"
        raise BadInput(f"--merge-tokens auto: {why}")
    probe = build_probe(dense, moments, request.method, images, request.loop(moments), watch)
    own = compute_site_curves(probe)
    unfitted = replace(probe, inputs=draw_inputs(dense, images, IMAGES))
    curves, losses = compute_cost_curves(probe, "macs", curves=own), compute_merge_curves(probe.model, unfitted.inputs)
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
