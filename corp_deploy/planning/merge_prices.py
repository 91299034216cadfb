"""What a plan of merged tokens and widths pays in: multiply-adds, or measured time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from corp_deploy.families.counting import site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.parts import tokens_that_enter

from .budget import dense_cost
from .curves import CostCurve
from .latency import LatencyTarget
from .latency_of_tokens import merges_of
from .merge_costs import MergeCosts, merge_costs_in_macs
from .merge_curves import MergeCurves
from .merge_latency import MergeLatencies, measure_merge_latencies, merge_costs_in_ns, sites_ns
from .probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """In one currency: the dense model's cost, that of schedules, and `priced`: the sites' curves in a model that
    merges tokens, with that model's cost. `where` tells latency's.
    """

    currency: Literal["macs", "latency"]
    full_cost: int
    costs: MergeCosts
    priced: Callable[[nn.Module], tuple[list[CostCurve], int]]
    where: LatencyTarget | None = None

    def used(self, share: float, allowed: float) -> str:
        """What of a budget a plan uses, in words."""
        if self.where is None:
            return f"budget: {share:.1%} of the dense {self.currency} used of {allowed:.1%} allowed"
        return (
            f"budget: {share:.1%} of the dense latency predicted of {allowed:.1%} allowed, which is "
            f"{share * self.full_cost / 1e6:.3f} of {self.full_cost / 1e6:.3f} ms at batch {self.where.batches[0]} in "
            f"{self.where.backend}"
        )


def prices_in_macs(probe: Probe, curves: list[CostCurve], losses: MergeCurves) -> Prices:
    """Counted, and by formula."""

    def priced(model: nn.Module) -> tuple[list[CostCurve], int]:
        costs, sites = site_costs(model, "macs"), sites_of(model).by_name
        repriced = [
            replace(
                curve,
                costs=tuple(costs.of(sites[curve.site], width) for width in curve.widths),
                cost_now=costs.now[curve.site],
            )
            for curve in curves
        ]
        return repriced, dense_cost(model, "macs")

    full_cost = dense_cost(probe.model, "macs")
    return Prices(currency="macs", full_cost=full_cost, costs=merge_costs_in_macs(probe.model, losses), priced=priced)


def prices_by_latencies(
    dense: Checkpoint, curves: list[CostCurve], losses: MergeCurves, latencies: MergeLatencies, where: LatencyTarget
) -> Prices:
    """Nanoseconds, by what was measured; a merged model costs what its layers and merges do, beside what is fixed."""
    sites = sites_of(dense.model).by_name
    alone = sites_ns(dense, latencies, tokens_that_enter(dense.model))
    full_cost = max(round(1e6 * latencies.model_ms()), sum(alone.values()))

    def priced(model: nn.Module) -> tuple[list[CostCurve], int]:
        tokens = tokens_that_enter(model)
        now = sites_ns(dense, latencies, tokens)
        merging = sum(latencies.merge_ms(entering, merge.count) for merge, entering in merges_of(model).values())
        repriced = list[CostCurve]()
        for curve in curves:
            at, widths = tokens[curve.site], [*curve.widths, sites[curve.site].width]
            costs = [round(1e6 * latencies.site_ms(curve.site, width, at)) for width in widths]
            least = min(costs)
            *of_widths, cost_now = (cost - least for cost in costs)
            repriced.append(replace(curve, costs=tuple(of_widths), cost_now=cost_now))
        return repriced, full_cost - sum(alone.values()) + sum(now.values()) + round(1e6 * merging)

    costs = merge_costs_in_ns(dense, losses, latencies)
    return Prices(currency="latency", full_cost=full_cost, costs=costs, priced=priced, where=where)


def prices_in_time(
    dense: Checkpoint, probe: Probe, curves: list[CostCurve], losses: MergeCurves, where: LatencyTarget
) -> Prices:
    """Measured on this machine, or read from the tables where they hold it."""
    return prices_by_latencies(
        dense, curves, losses, measure_merge_latencies(dense, probe.method, losses, where), where
    )
