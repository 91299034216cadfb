"""Prices of merged tokens and widths: multiply-adds, or measured time.

Time comes from tables of layers at a few numbers of tokens and of merges of a few sizes, each measured alone. Values
between these are interpolated, so that one set of measurements prices every schedule.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.method import Method
from corp_deploy.spec.merging import most_merged
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.parts import tokens_that_enter
from corp_deploy.traced.models.steps import SegmentStep
from corp_deploy.traced.models.token_merging import TokenMerge
from perf.bench.latency_table import Grid, LatencyTable

from .curves import CostCurve
from .first_plan import dense_cost
from .latency import POINTS, name_at_tokens, open_grids, price_in_nanoseconds, refuse_disturbed
from .merge_curves import MergeCurves, find_merge_places
from .request import LatencyTarget
from .schedule import (
    MergeCosts,
    cost_of_merges,
    interpolate_latency,
    merge_costs_in_macs,
    merges_with_tokens,
    pick_evenly,
)

TOKENS = 4  # numbers of tokens that a layer and a merge are measured at
FEWER_POINTS = 3  # widths of a layer that are measured at fewer tokens than all
FEW = 1 / 8  # the smaller of the two merges that are measured, as a share of the largest one possible


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLatencies:
    """Latency tables of layers, merges and the dense model, at one batch size.

    `sites` holds the tables of each site's layer by its number of tokens, and `merges` those of a merge by the tokens
    that enter it and the tokens that it merges away. `parts` are sites in different parts of the model, one in each
    measured part, so that their latencies add up to that of all parts.
    """

    sites: Mapping[str, Mapping[int, LatencyTable]]
    merges: Mapping[int, Mapping[int, LatencyTable]]
    protected: int
    dense: LatencyTable
    batch: int
    parts: tuple[str, ...] = ()

    def site_ms(self, site: str, size: int, tokens: int) -> float:
        """Return the milliseconds of a site's block with the site at width `size`, at this number of tokens."""
        return interpolate_latency(self.sites[site], tokens, size, self.batch)

    def merge_ms(self, tokens: int, count: int) -> float:
        """Return the milliseconds of a merge of `count` tokens, interpolated between measured counts and tokens."""
        if not count:
            return 0.0
        share, measured = count / most_merged("merge", tokens, self.protected), sorted(self.merges)
        at = []
        for entering in measured:
            counts, most = sorted(self.merges[entering]), most_merged("merge", entering, self.protected)
            took = [self.merges[entering][each].latency_ms(1, self.batch) for each in counts]
            at.append(np.interp(share, [each / most for each in counts], took))
        return float(np.interp(tokens, measured, at))

    @property
    def dense_ns(self) -> int:
        """The latency of the dense model in nanoseconds."""
        return round(1e6 * self.dense.latency_ms(1, self.batch))


def measure_merge_latencies(
    dense: Checkpoint, method: Method, losses: MergeCurves, where: LatencyTarget
) -> MergeLatencies:
    """Measure, or read from the cache, a few dozen latencies: of each layer's shape, each merge's size, and the model.

    Raises BadInput if other programs had the machine for too much of a measurement.
    """
    model, places = dense.model, find_merge_places(dense.model)
    counts = pick_evenly(tuple(losses.tokens - int(amount) for amount in losses.amounts_G[::-1]), TOKENS)
    with open_grids(model, method, where) as grids:
        shapes = grids.shapes
        behind = {shapes[name]: name for place in places for name in place.sites if name in shapes}
        at_shapes: dict[str, dict[int, Grid]] = {}
        for shape in dict.fromkeys(shapes.values()):
            site = behind.get(shape) or next(site for site, own in shapes.items() if own == shape)
            at_shapes[shape] = {
                tokens: grids.of_site(
                    name_at_tokens(shape, tokens, losses.tokens),
                    site,
                    tokens,
                    points=POINTS if tokens == losses.tokens else FEWER_POINTS,
                )
                for tokens in (counts if shape in behind else counts[-1:])
            }
        merges: dict[int, dict[int, Grid]] = {}
        for tokens in counts:
            most = most_merged("merge", tokens, losses.protected)
            for count in sorted({max(1, round(FEW * most)), most}) if most else ():
                merge = TokenMerge(count=count, protected=losses.protected, how="merge")
                merges.setdefault(tokens, {})[count] = grids.of_merge(merge, tokens)
        whole = grids.of_model(dense)
        every = [grid for of in (*at_shapes.values(), *merges.values()) for grid in of.values()]
        measured = grids.measured({grid.name: grid for grid in (*every, whole)})
    tables = {name: table for name, (table, _) in measured.items()}
    refuse_disturbed(tables)

    def tables_of(grids: Mapping[int, Grid]) -> dict[int, LatencyTable]:
        return {size: tables[grid.name] for size, grid in grids.items()}

    return MergeLatencies(
        sites={
            site.name: tables_of(at_shapes[shapes[site.name]]) if site.name in shapes else {}
            for site in sites_of(model).every
        },
        merges={tokens: tables_of(sizes) for tokens, sizes in merges.items()},
        protected=losses.protected,
        dense=tables[whole.name],
        batch=where.batches[0],
        parts=_parts(model),
    )


def _parts(model: nn.Module) -> tuple[str, ...]:
    """Return the name of one site of each segment that has a site which is in no other segment."""
    every = [site.name for site in sites_of(model).every]
    steps = [step for step in traced_model.steps(model) if isinstance(step, SegmentStep)]
    count = Counter(name for step in steps for name in step.sites)
    own = ([name for name in step.sites if count[name] == 1 and name in every] for step in steps)
    return tuple(names[0] for names in own if names)


def sites_ns(dense: Checkpoint, latencies: MergeLatencies, tokens: Mapping[str, int]) -> dict[str, int]:
    """Return, by measured site, the nanoseconds of its block at the present width and its number of tokens."""
    sites = sites_of(dense.model).by_name
    return {name: round(1e6 * latencies.site_ms(name, sites[name].width, tokens[name])) for name in latencies.parts}


def merge_costs_in_ns(dense: Checkpoint, losses: MergeCurves, latencies: MergeLatencies) -> MergeCosts:
    """Return the costs in nanoseconds of one call; time of the model that no measured layer explains is fixed."""
    behind = [[name for name in place.sites if name in latencies.parts] for place in find_merge_places(dense.model)]
    at = [sites_ns(dense, latencies, dict.fromkeys(latencies.sites, tokens)) for tokens in losses.left]
    alone = at[0]  # with all tokens
    total = max(latencies.dense_ns, sum(alone.values()))
    return MergeCosts(
        fixed=float(total - sum(alone[name] for names in behind for name in names)),
        running_LG=np.array([[sum(of[name] for name in names) for of in at] for names in behind], dtype=np.float64),
        merging_GG=cost_of_merges(losses, lambda tokens, count: 1e6 * latencies.merge_ms(tokens, count)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The dense model's cost, the costs of schedules, and a function that prices the curves for a merging model.

    `priced` returns the sites' curves with their costs in that model, and the model's cost.
    """

    full_cost: int
    costs: MergeCosts
    priced: Callable[[nn.Module], tuple[list[CostCurve], int]]


def prices_in_macs(dense: nn.Module, curves: list[CostCurve], losses: MergeCurves) -> Prices:
    """Price schedules and widths in multiply-adds, counted for the dense model and by formula at fewer tokens."""

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

    return Prices(full_cost=dense_cost(dense, "macs"), costs=merge_costs_in_macs(dense, losses), priced=priced)


def prices_by_latencies(
    dense: Checkpoint, curves: list[CostCurve], losses: MergeCurves, latencies: MergeLatencies
) -> Prices:
    """Price schedules and widths in nanoseconds, as measured; the rest of the model's time is a fixed cost."""
    alone = sum(sites_ns(dense, latencies, tokens_that_enter(dense.model)).values())
    full_cost = max(latencies.dense_ns, alone)

    def priced(model: nn.Module) -> tuple[list[CostCurve], int]:
        tokens = tokens_that_enter(model)
        now = sum(sites_ns(dense, latencies, tokens).values())
        merging = sum(
            latencies.merge_ms(entering, merge.count) for merge, entering in merges_with_tokens(model).values()
        )
        repriced = price_in_nanoseconds(curves, lambda site, width: latencies.site_ms(site, width, tokens[site]))
        return repriced, full_cost - alone + now + round(1e6 * merging)

    return Prices(full_cost=full_cost, costs=merge_costs_in_ns(dense, losses, latencies), priced=priced)
