"""Merged tokens and widths for one budget together.

Schedules that leave 95, 90, 85, ... % of the cost are settled first (see schedule.py); what each loses is measured on
images from everywhere, as nothing is fitted to any. The widths then have what the schedule leaves of the budget, at
the tokens that it leaves, and both errors add. The best of these sums are tried end to end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.traced.models.merging import Merging, Metric
from ground.errors import BadInput

from .budget import Allocation, allocate
from .curves import CostCurve, SiteCurves, output_errors
from .merge_curves import MergeCurves
from .merge_prices import Prices
from .probe import Probe
from .schedule import Schedule, best_schedule, shaped_schedule, shapes

GRID = 0.05
TRIED = 2
ABOUT = 1.1  # times the least error


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One schedule, or none: the squared relative error it alone was measured to cause, the sites' curves at the tokens
    that it leaves, and the whole model's cost then.
    """

    merging: Merging | None
    lost: float
    curves: list[CostCurve]
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JointAllocation:
    """A schedule with the widths for the rest of a budget; its error is that of both."""

    merging: Merging | None
    allocated: Allocation
    again: bool = False

    def describe(self) -> str:
        name = "widths alone" if self.merging is None else f"tokens {self.merging.describe()}, and widths"
        return f"{name}, allocated again" if self.again else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a joint plan follows from but its share, in one currency; `merging` makes a schedule's merging.

    `metrics`: those that what is settled is tried with beside its own. `own`: the sites' curves in their own units.
    `unfitted` looks at inputs from everywhere, for what is merged without
    a fit; those of `probe` no fit has seen. `stages` are those settled so far, by the share that merging alone keeps.
    """

    probe: Probe
    unfitted: Probe
    own: SiteCurves
    merging: Callable[[tuple[int, ...]], Merging]
    losses: MergeCurves
    prices: Prices
    metrics: tuple[Metric, ...] = ()
    stages: dict[int, Stage | None] = field(default_factory=dict)

    @property
    def full_cost(self) -> int:
        """The dense model's cost."""
        return self.prices.full_cost

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
        ways = [(lost[best], mergings[best])]
        others = (replace(mergings[best], metric=metric) for metric in self.metrics)
        ways += [(self._lost(other), other) for other in others]
        least, merging = min(ways, key=lambda way: way[0])
        curves, cost = self.prices.priced(traced_model.with_merging(model, merging))
        return Stage(merging=merging, lost=least, curves=curves, cost=cost)

    def _lost(self, merging: Merging) -> float:
        return self.unfitted.effect_of(traced_model.with_merging(self.probe.model, merging))

    def _at(self, stage: Stage, share: float) -> JointAllocation | None:
        """None where even the narrowest widths cost more than this schedule leaves."""
        fixed = stage.cost - sum(curve.cost_now for curve in stage.curves)
        if fixed + sum(min(curve.costs) for curve in stage.curves) > share * self.full_cost:
            return None
        widths = allocate(stage.curves, stage.cost, share, full_cost=self.full_cost)
        error = (stage.lost + widths.predicted_error**2) ** 0.5
        return JointAllocation(merging=stage.merging, allocated=replace(widths, predicted_error=error))

    def ranked(self, share: float) -> list[JointAllocation]:
        """Every schedule that leaves more than the share, with widths for the rest, the least error predicted first.

        Raises BadInput where nothing keeps so little.
        """
        stages = [self._stage(step) for step in range(int((1.0 - share) / GRID + 1e-9) + 1)]
        ways = [self._at(stage, share) for stage in stages if stage is not None]
        ranked = sorted((way for way in ways if way is not None), key=lambda way: way.allocated.predicted_error)
        if not ranked:
            raise BadInput(
                f"a budget of {share:g} is out of reach: the narrowest widths and {self.losses.amounts_G[-1]} of "
                f"{self.losses.tokens} tokens merged away keep {self.narrowest():.3f}; ask for more"
            )
        return ranked

    def narrowest(self) -> float:
        """About the least share that any widths keep, with as many tokens merged as a schedule of the grid can."""
        least = 0
        while self._schedules(least + 1):
            least += 1
        stage = self._stage(least)
        assert stage is not None, least
        fixed = stage.cost - sum(curve.cost_now for curve in stage.curves)
        return (fixed + sum(min(curve.costs) for curve in stage.curves)) / self.full_cost

    def again(self, way: JointAllocation, share: float) -> JointAllocation | None:
        """The same schedule with widths by what every site loses where tokens are merged so; None where those are the
        same widths.
        """
        (stage,) = (each for each in self.stages.values() if each is not None and each.merging == way.merging)
        probe, model = self.probe.few, self.probe.model
        if way.merging is not None:
            with torch.inference_mode(False), torch.no_grad():  # gradients go through it
                merged = traced_model.with_merging(model, way.merging)
            probe = replace(probe, model=merged)
        errors = output_errors(probe, self.own)
        curves = [replace(curve, errors=errors[curve.site]) for curve in stage.curves]
        widths = allocate(curves, stage.cost, share, full_cost=self.full_cost)
        if widths.widths == way.allocated.widths:
            return None
        error = (stage.lost + widths.predicted_error**2) ** 0.5
        return JointAllocation(merging=way.merging, allocated=replace(widths, predicted_error=error), again=True)

    def carried_out(self, way: JointAllocation) -> nn.Module:
        """The model that a way leaves, as the probe has it."""
        return self.probe.carried_out(way.allocated.widths, merging=way.merging)

    def measured(self, model: nn.Module) -> float:
        """Relative change of the outputs on the probe's images."""
        return math.sqrt(self.probe.effect_of(model))
