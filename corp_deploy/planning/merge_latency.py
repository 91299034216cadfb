"""What merging saves and costs in time: layers at a few numbers of tokens, and merges of a few sizes, measured alone.

Between those it is interpolated, so that one set of measurements prices every schedule. Legend: L blocks that can
merge, G numbers of tokens merged so far.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.merging import most_merged
from corp_deploy.traced.models.steps import SegmentStep
from corp_deploy.traced.models.token_merging import TokenMerge
from ground.ports import Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.timing.watch import environment, watching

from .latency import POINTS, LatencyTarget, SiteGrids, grid_of_merge, grid_of_model, refuse_disturbed
from .latency_of_tokens import latency_at, merge_name, spread, stream_channels
from .merge_costs import MergeCosts
from .merge_curves import MergeCurves, merge_places

TOKENS = 4  # numbers of tokens that a layer and a merge are measured at
FEWER_POINTS = 3  # widths of a layer that are measured with fewer than all tokens
FEW = 1 / 8  # of the most that can be merged at once; a merge of so many is measured, and one of all those


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLatencies:
    """Tables of each site's layer by its number of tokens, of merges by the tokens that enter and how many are merged
    away, and of the dense model, at one batch size. `parts`: sites whose tables are of all that any is, each part of
    the model once; `of_segments`: whether a table is of more than its site, whose is what it takes above that at the
    narrowest.
    """

    sites: Mapping[str, Mapping[int, LatencyTable]]
    merges: Mapping[int, Mapping[int, LatencyTable]]
    protected: int
    dense: LatencyTable
    batch: int
    parts: tuple[str, ...] = ()

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

    def model_ms(self) -> float:
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
    sites, places = sites_of(model).every, merge_places(model)
    counts = spread(tuple(losses.tokens - int(amount) for amount in losses.amounts_G[::-1]), TOKENS)
    channels = stream_channels(model)
    with tempfile.TemporaryDirectory() as scratch, watching() as (watch, gpu):
        how: dict[str, Any] = {"described": environment(gpu), "watch": watch}

        def table(grid: Grid) -> LatencyTable:
            return cached_table(grid, where.plan, where.cache, **how)[0]

        grids = SiteGrids(model=model, method=method, where=where, scratch=Path(scratch))
        behind = {grids.shapes[name]: name for place in places for name in place.sites if name in grids.shapes}
        of_shapes: dict[str, dict[int, LatencyTable]] = {}
        for site, shape in grids.shapes.items():
            if shape in of_shapes:
                continue
            of_shapes[shape] = {}
            for tokens in counts if shape in behind else counts[-1:]:
                is_unmerged = tokens == losses.tokens
                name, points = (shape, POINTS) if is_unmerged else (f"{shape}, {tokens} tokens", FEWER_POINTS)
                grid = grids.grid(name, behind.get(shape, site), tokens, points=points)
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
        sites={site.name: of_shapes[grids.shapes[site.name]] if site.name in grids.shapes else {} for site in sites},
        merges=merges,
        protected=losses.protected,
        dense=whole_table,
        batch=batch,
        parts=_parts(model),
    )


def _parts(model: nn.Module) -> tuple[str, ...]:
    """A site for each step, that stands in no other."""
    every = [site.name for site in sites_of(model).every]
    steps = [step for step in traced_model.steps(model) if isinstance(step, SegmentStep)]
    count = Counter(name for step in steps for name in step.sites)
    own = ([name for name in step.sites if count[name] == 1 and name in every] for step in steps)
    return tuple(names[0] for names in own if names)


def sites_ns(dense: Checkpoint, latencies: MergeLatencies, tokens: Mapping[str, int]) -> dict[str, int]:
    """Of the layer of each part of the model at its own width and so many tokens."""
    sites = sites_of(dense.model).by_name
    return {name: round(1e6 * latencies.site_ms(name, sites[name].width, tokens[name])) for name in latencies.parts}


def merge_costs_in_ns(dense: Checkpoint, losses: MergeCurves, latencies: MergeLatencies) -> MergeCosts:
    """Nanoseconds of one call, by layers and merges measured alone; what they can't explain of the model is fixed."""
    model = dense.model
    all_tokens = len(traced_model.token_kinds(model))
    left = [losses.tokens - int(amount) for amount in losses.amounts_G]
    behind = [[name for name in place.sites if name in latencies.parts] for place in merge_places(model)]
    at = [sites_ns(dense, latencies, dict.fromkeys(latencies.sites, tokens)) for tokens in left]
    running_LG = np.array([[sum(of[name] for name in names) for of in at] for names in behind], dtype=np.float64)
    merging_GG = np.full((len(left), len(left)), np.inf)
    for one, tokens in enumerate(left):
        for other in range(one, len(left)):
            if tokens - left[other] <= most_merged("merge", tokens, losses.protected):
                merging_GG[one, other] = 1e6 * latencies.merge_ms(tokens, tokens - left[other])
    alone = sites_ns(dense, latencies, dict.fromkeys(latencies.sites, all_tokens))
    total = max(round(1e6 * latencies.model_ms()), sum(alone.values()))
    fixed = total - sum(alone[name] for names in behind for name in names)
    return MergeCosts(fixed=float(fixed), running_LG=running_LG, merging_GG=merging_GG)
