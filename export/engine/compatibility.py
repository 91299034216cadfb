"""What a plan that runs on more hardware costs: beside plans of the same graph that were built for one GPU each."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from ground.records import Natural, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan and what it costs; None where its builder doesn't tell. `device_memory_bytes`: of its largest profile."""

    target: str
    plan_bytes: Positive
    kernels: Natural | None
    fused_attention: Natural | None
    device_memory_bytes: Natural | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLatency:
    """The compatible plan's time over the other's at a batch, with its interval: 1.04 is 4 % slower."""

    target: str
    batch: Positive
    ratio: Annotated[float, msgspec.Meta(gt=0.0)]
    low: Annotated[float, msgspec.Meta(gt=0.0)]
    high: Annotated[float, msgspec.Meta(gt=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityPrice:
    """`own`: the compatible plan; `plans`: those for one GPU each. `reason` says why a latency was not measured."""

    level: str
    own: PricedPlan
    plans: tuple[PricedPlan, ...]
    latencies: tuple[PricedLatency, ...] = ()
    reason: str | None = None
