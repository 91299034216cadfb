"""What a reduction is to be, settled before it is done, and what it was weighed against."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from corp_deploy.algebra.obs import Elimination
from corp_deploy.families.family import sites_of
from corp_deploy.families.widths import Widths, is_empty
from corp_deploy.reduction.method import Method
from corp_deploy.traced.models.merging import Merging


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedAllocation:
    """A budget's allocation: the share that stays, the relative error predicted, and the one found by the probe."""

    name: str
    share: float
    predicted_error: float
    measured_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A way to carry out a plan: its relative output error on images that it wasn't fitted to, and what it took."""

    name: str
    error: float
    seconds: float
    kept: bool = False

    def describe(self) -> str:
        return f"{self.name} errs {self.error:.4f} ({self.seconds:,.1f} s)"


NAMED = 6


def left_alone(model: nn.Module, widths: Widths) -> tuple[str, ...]:
    """A sentence on the sites that a budget spares, none where it spares none."""
    sites = [site for site in sites_of(model).every if not is_empty(site.width)]
    unreduced = [site.name for site in sites if widths.get(site.name, site.width) == site.width]
    if not unreduced:
        return ()
    named = f"{', '.join(unreduced[:NAMED])}{', ...' if len(unreduced) > NAMED else ''}"
    return (f"left alone: {len(unreduced)} of {len(sites)} sites would lose more than narrower ones save ({named})",)


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthPlan:
    """Method and widths settled (None: uniform), with a sentence on each thing that was decided.

    `ways`: the one taken and those it was weighed against. `eliminations`: work that the reduction need not repeat.
    `metrics`: what was learned of layers' outputs, see Moments. `stages`: what was tried to carry it out.
    `within`: what was tried for a limit, as JSON values. `merging`: what a budget chose to merge away.
    """

    method: Method
    widths: Widths | None
    decisions: tuple[str, ...]
    predicted_speedup: float | None = None
    ways: tuple[ProbedAllocation, ...] = ()
    eliminations: Mapping[str, Elimination] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    within: Mapping[str, Any] | None = None
    merging: Merging | None = None
