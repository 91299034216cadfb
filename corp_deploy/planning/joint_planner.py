"""Merged tokens and widths for every share of one budget, from one look at the images."""

from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.invocation.merging import MergedStatistics
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import Merging, Metric
from ground.effort import Stopwatch
from ground.errors import BadInput

from .budget_planner import probe_of
from .curves import cost_curves, site_curves
from .joint import TRIED, Joint, JointAllocation
from .merge_curves import merge_curves
from .merge_prices import prices_in_macs, prices_in_time
from .merging import merging_of_schedule
from .probe import Probe
from .probe_split import from_everywhere
from .request import ReductionRequest
from .width_plan import ProbedAllocation, WidthPlan, left_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlanner:
    """What BudgetPlanner is, for a budget that chooses which tokens are merged away too."""

    joint: Joint

    @property
    def probe(self) -> Probe:
        return self.joint.probe

    @property
    def currency(self) -> str:
        return self.joint.prices.currency

    def narrowest(self) -> float:
        """About the least share that is within reach."""
        return self.joint.narrowest()

    def _planned(self, way: JointAllocation, share: float) -> WidthPlan:
        kept, prices = way.allocated.share, self.joint.prices
        return WidthPlan(
            method=self.probe.method,
            widths=way.allocated.widths,
            decisions=(
                f"{prices.used(kept, share)}, {way.describe()}",
                *left_alone(self.probe.model, way.allocated.widths),
            ),
            predicted_speedup=1.0 / kept if prices.currency == "latency" else None,
            eliminations=self.probe.eliminations,
            metrics=self.probe.moments.metrics,
            merging=way.merging,
        )

    def widths_at(self, share: float) -> WidthPlan:
        """The schedule and the widths of least predicted error. Raises BadInput where nothing keeps so little."""
        return self._planned(self.joint.ranked(share)[0], share)

    def tried_at(self, share: float) -> WidthPlan:
        """The best on the probe's images of those that were predicted to be the best, and of the best one's widths
        allocated again where tokens are merged so; all are told.
        """
        ways = self.joint.ranked(share)[:TRIED]
        models = [self.joint.carried_out(way) for way in ways]
        errors = [self.joint.measured(model) for model in models]
        best = errors.index(min(errors))
        if again := self.joint.again(ways[best], share):
            ways, errors = [*ways, again], [*errors, self.joint.measured(self.joint.carried_out(again))]
        probed = tuple(
            ProbedAllocation(
                name=way.describe(),
                share=way.allocated.share,
                predicted_error=way.allocated.predicted_error,
                measured_error=error,
            )
            for way, error in zip(ways, errors, strict=True)
        )
        return replace(self._planned(ways[errors.index(min(errors))], share), ways=probed)


def _metrics_beside(model: nn.Module, choice: MergedStatistics) -> tuple[Metric, ...]:
    """Those tried beside the one asked for: the class token's attention beside the default, where a model has it."""
    attended = Merging(schedule=(1,) * traced_model.depth(model), metric="attended")
    if choice.merge_metric != "ward":
        return ()
    try:
        traced_model.with_merging(model, attended)
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
    unfitted = replace(probe, inputs=from_everywhere(dense, images))
    curves, losses = cost_curves(probe, "macs", curves=own), merge_curves(probe.model, unfitted.inputs)
    if currency == "latency":
        assert where is not None, currency
        prices = prices_in_time(dense, probe, curves, losses, where)
    else:
        prices = prices_in_macs(probe, curves, losses)
    return JointPlanner(
        joint=Joint(
            probe=probe,
            unfitted=unfitted,
            own=own,
            merging=partial(merging_of_schedule, request.options),
            losses=losses,
            prices=prices,
            metrics=_metrics_beside(dense.model, request.options),
        )
    )
