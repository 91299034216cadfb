"""What merging saves and costs in time: layers at a few numbers of tokens, and merges of a few sizes, measured alone.

Between those it is interpolated, so that one set of measurements prices every schedule. Legend: L blocks that can
merge, G numbers of tokens merged so far.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.merging import most_merged
from corp_deploy.families.token_merging import TokenMerge
from corp_deploy.families.widths import is_empty
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from ground.ports import Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.timing.environment import environment
from perf.timing.watch import watching

from .latency import POINTS, LatencyTarget, grid_of_merge, grid_of_model, grid_of_site, refuse_disturbed, table_name
from .latency_of_tokens import latency_at, merge_name, spread
from .merge_costs import MergeCosts
from .merge_curves import MergeCurves, merge_places

TOKENS = 4  # numbers of tokens that a layer and a merge are measured at
FEWER_POINTS = 3  # widths of a layer that are measured with fewer than all tokens
FEW = 1 / 8  # of the most that can be merged at once; a merge of so many is measured, and one of all those


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLatencies:
    """Tables of each site's layer by its number of tokens, of merges by the tokens that enter and how many are merged
    away, and of the dense model, at one batch size.
    """

    sites: Mapping[str, Mapping[int, LatencyTable]]
    merges: Mapping[int, Mapping[int, LatencyTable]]
    protected: int
    dense: LatencyTable
    batch: int

    def site_ms(self, site: str, size: int, tokens: int) -> float:
        """Of a site's layer."""
        return latency_at(self.sites[site], tokens, size, self.batch)

    def merge_ms(self, tokens: int, count: int) -> float:
        """Of one merge, straight between those measured: by the share of what can be merged, and by tokens."""
        if not count:
            return 0.0
        share, measured = count / most_merged("merge", tokens, self.protected), sorted(self.merges)
        at = [
            np.interp(
                share,
                [each / most_merged("merge", entering, self.protected) for each in sorted(self.merges[entering])],
                [self.merges[entering][each].latency_ms(1, self.batch) for each in sorted(self.merges[entering])],
            )
            for entering in measured
        ]
        return float(np.interp(tokens, measured, at))

    def whole_ms(self) -> float:
        """Of the dense model."""
        return self.dense.latency_ms(1, self.batch)


def _merge_sizes(tokens: int, protected: int) -> list[int]:
    most = most_merged("merge", tokens, protected)
    return sorted({max(1, round(FEW * most)), most}) if most else []


def measure_merge_latencies(
    dense: Checkpoint, method: Method, losses: MergeCurves, where: LatencyTarget
) -> MergeLatencies:
    """A few dozen timings, from the cache where it holds them: of one layer of each shape, one merge of each size, and
    the model. Raises BadInput where other programs had the machine for too much of one.
    """
    model, batch = dense.model, where.batches[0]
    sites = sites_of(model).every
    every = [site for site in sites if not is_empty(site.width)]
    counts = spread(tuple(losses.tokens - int(amount) for amount in losses.amounts_G[::-1]), TOKENS)
    shapes = {site.name: table_name(site, method, model) for site in every}
    channels = every[0].entering(1)[-1]
    with tempfile.TemporaryDirectory() as scratch, watching() as (watch, gpu):
        how: dict[str, Any] = {"described": environment(gpu), "watch": watch}

        def table(grid: Grid) -> LatencyTable:
            return cached_table(grid, where.plan, where.cache, **how)[0]

        of_shapes: dict[str, dict[int, LatencyTable]] = {}
        for site in every:
            shape = shapes[site.name]
            if shape in of_shapes:
                continue
            of_shapes[shape] = {}
            for tokens in counts:
                whole = tokens == losses.tokens
                name, points = (shape, POINTS) if whole else (f"{shape}, {tokens} tokens", FEWER_POINTS)
                grid = grid_of_site(name, site, method, model, tokens, where, Path(scratch), points=points)
                of_shapes[shape][tokens] = table(grid)
        merges: dict[int, dict[int, LatencyTable]] = {}
        for tokens in counts:
            for count in _merge_sizes(tokens, losses.protected):
                merge = TokenMerge(count=count, protected=losses.protected, how="merge")
                inputs = (Port(name="tokens", shape=(tokens, channels)),)
                grid = grid_of_merge(merge_name(merge, tokens, channels), merge, inputs, where, Path(scratch))
                merges.setdefault(tokens, {})[count] = table(grid)
        whole_table = table(grid_of_model(dense, where, Path(scratch)))
    layers = [each for of_tokens in of_shapes.values() for each in of_tokens.values()]
    of_merges = [each for of_counts in merges.values() for each in of_counts.values()]
    refuse_disturbed({each.name: each for each in (*layers, *of_merges, whole_table)})
    return MergeLatencies(
        sites={site.name: of_shapes[shapes[site.name]] if site.name in shapes else {} for site in sites},
        merges=merges,
        protected=losses.protected,
        dense=whole_table,
        batch=batch,
    )


def sites_ns(dense: Checkpoint, latencies: MergeLatencies, tokens: Mapping[str, int]) -> dict[str, int]:
    """Of every site's layer at its own width and so many tokens."""
    sites = sites_of(dense.model).every
    return {
        site.name: round(1e6 * latencies.site_ms(site.name, site.size_of(site.width), tokens[site.name]))
        for site in sites
    }


def merge_costs_in_ns(dense: Checkpoint, losses: MergeCurves, latencies: MergeLatencies) -> MergeCosts:
    """Nanoseconds of one call, by layers and merges measured alone; what they can't explain of the model is fixed."""
    model = dense.model
    whole = len(family_of(model).token_kinds(model))
    left = [losses.tokens - int(amount) for amount in losses.amounts_G]
    behind = [[name for name in place.behind if name in latencies.sites] for place in merge_places(model)]
    at = [sites_ns(dense, latencies, dict.fromkeys(latencies.sites, tokens)) for tokens in left]
    running_LG = np.array([[sum(of[name] for name in names) for of in at] for names in behind], dtype=np.float64)
    merging_GG = np.full((len(left), len(left)), np.inf)
    for one, tokens in enumerate(left):
        for other in range(one, len(left)):
            if tokens - left[other] <= most_merged("merge", tokens, losses.protected):
                merging_GG[one, other] = 1e6 * latencies.merge_ms(tokens, tokens - left[other])
    alone = sites_ns(dense, latencies, dict.fromkeys(latencies.sites, whole))
    total = max(round(1e6 * latencies.whole_ms()), sum(alone.values()))
    fixed = total - sum(alone[name] for names in behind for name in names)
    return MergeCosts(fixed=float(fixed), running_LG=running_LG, merging_GG=merging_GG)
