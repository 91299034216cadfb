"""Latency tables of sites on this machine: each kind of block measured alone over a grid of widths.

A site is timed by the segments of the traced program that it is in, with the other sites there whole, on the backend
that the model will run on. If tokens are merged, a block is measured at a few numbers of tokens, between which its
latency is interpolated; each merge is measured as a layer, and the whole model also with all its tokens.

Tables are cached under the machine's fingerprint, so that a second budget measures nothing: those of blocks by shape
and structure, that of the whole model by its digest.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports, sites_of
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import model_digest
from corp_deploy.traced.models.parts import STREAM, build_part, tokens_that_enter
from corp_deploy.traced.models.token_merging import TokenMerge
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.timing.watch import environment, watching

from .curves import CostCurve
from .request import LatencyTarget
from .schedule import POINTS as TOKEN_POINTS
from .schedule import MergeAlone, interpolate_latency, merge_name, merges_with_tokens, pick_evenly, stream_channels

Inputs = tuple[Port, ...]
Outputs = tuple[OutputPort, ...]
POINTS = 6  # widths that a site is measured at
DENSE, ALL_TOKENS = "the dense model", "the dense model with all tokens"


def refuse_disturbed(tables: Mapping[str, LatencyTable]) -> None:
    """Raise BadInput if other programs or throttling slowed down too much of a measurement; name its table."""
    disturbed = [name for name, table in tables.items() if any(cell.disturbed for cell in table.cells)]
    if disturbed:
        raise BadInput(
            f"latency tables of {', '.join(disturbed)}: other programs had the machine, or it was throttled, while "
            "they were measured; delete the tables' directory and measure again when it is quiet and cool"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTables:
    """Latency tables by name, and the names of those of each site.

    `names` holds the names of a site's tables by number of tokens, `tokens` the number that reaches each site, and
    `merges` the name of each token merge's table. `dense` is the latency of the model, and `all_tokens` that without
    its merging, both tables with the one width 1. `measured` counts the tables that were not in the cache.
    """

    by_name: dict[str, LatencyTable]
    names: dict[str, dict[int, str]]
    tokens: dict[str, int]
    dense: LatencyTable
    merges: dict[str, str]
    all_tokens: LatencyTable | None
    measured: int

    def latency_ms(self, site: str, size: int, batch: int) -> float:
        """Return the milliseconds of a site's block, timed alone, at width `size` and the tokens that reach it."""
        at = {tokens: self.by_name[name] for tokens, name in self.names[site].items()}
        return interpolate_latency(at, self.tokens[site], size, batch)

    def merging_ms(self, batch: int) -> float:
        """Return the milliseconds of all token merges, each measured alone."""
        return sum(self.by_name[name].latency_ms(1, batch) for name in self.merges.values())

    def model_ms(self, batch: int) -> float:
        """Return the milliseconds of the model without token merging."""
        return (self.all_tokens or self.dense).latency_ms(1, batch)


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class Grids:
    """A maker of the grids that are timed: of a site's block at several widths, a token merge, or a whole model.

    `model` merges no tokens. `scratch` is the directory of graphs while they are timed.
    """

    model: nn.Module
    method: Method
    where: LatencyTarget
    scratch: Path

    @cached_property
    def shapes(self) -> dict[str, str]:
        """The shape's name by site that can be narrower; blocks of sites with one name have equal latencies."""
        shapes, names = dict[str, str](), dict[str, str]()
        for site in sites_of(self.model).every:
            if len(kind_of(site).offers(site, self.method)) > 1:
                outline = build_part(self.model, site, site.width).cost_signature
                shapes[site.name] = names.setdefault(outline, f"{site.cost_signature}, as in {site.name}")
        return shapes

    def of_site(self, name: str, site: str, tokens: int, *, points: int = POINTS) -> Grid:
        own = sites_of(self.model).by_name[site]
        part = build_part(self.model, own, own.width, tokens)

        def open_width(size: int) -> ModuleRunner | OnnxRunner:
            module = build_part(self.model, own, size, tokens).module
            return _runner(module, part.inputs, part.outputs, self.where, self.scratch)

        return Grid(
            name=name,
            identity=part.cost_signature,
            open_width=open_width,
            inputs=part.inputs,
            widths=pick_evenly(tuple(kind_of(own).offers(own, self.method)), points),
            batches=self.where.batches,
        )

    def of_merge(self, merge: TokenMerge, tokens: int) -> Grid:
        channels = stream_channels(self.model)
        inputs = (Port(name="tokens", shape=(tokens, channels)),)
        return self._single(merge_name(merge, tokens, channels), "", MergeAlone(merge), inputs, (STREAM,))

    def of_model(self, checkpoint: Checkpoint) -> Grid:
        """Return the grid of the whole model, whose identity is its weights and layers."""
        model, name = checkpoint.model, f"dense {checkpoint.architecture.name}"
        identity = f"{model_digest(model)} {model!r}{traced_model.merging_of(model) or ''}"
        return self._single(name, identity, traced_model.exportable(model), input_ports(model), output_ports(model))

    def _single(self, name: str, identity: str, module: nn.Module, inputs: Inputs, outputs: Outputs) -> Grid:
        """Return the grid of a module without sites, with the one width 1."""
        return Grid(
            name=name,
            identity=identity,
            open_width=lambda _: _runner(module, inputs, outputs, self.where, self.scratch),
            inputs=inputs,
            widths=(1,),
            batches=self.where.batches,
        )

    def measured(
        self, grids: Mapping[str, Grid], on_progress: Callable[[int, int], None] = lambda finished, total: None
    ) -> dict[str, tuple[LatencyTable, bool]]:
        """Measure each grid or read its table from the cache; return each table, and whether it was in the cache."""
        tables = dict[str, tuple[LatencyTable, bool]]()
        with watching() as (watch, gpu):
            described = environment(gpu)
            for key, grid in grids.items():
                tables[key] = cached_table(grid, self.where.plan, self.where.cache, described=described, watch=watch)
                on_progress(len(tables), len(grids))
        return tables


@contextmanager
def open_grids(model: nn.Module, method: Method, where: LatencyTarget) -> Iterator[Grids]:
    with tempfile.TemporaryDirectory() as scratch:
        yield Grids(model=model, method=method, where=where, scratch=Path(scratch))


def _runner(
    module: nn.Module, inputs: Inputs, outputs: Outputs, where: LatencyTarget, scratch: Path
) -> ModuleRunner | OnnxRunner:
    if where.backend == "torch":
        return ModuleRunner(module, threads=where.threads, inputs=inputs, outputs=outputs)
    path = Path(tempfile.mkdtemp(dir=scratch)) / "block.onnx"
    save_onnx(onnx_from_model(module, inputs, outputs, precision="fp32", metadata={}), path)
    return OnnxRunner(path, threads=where.threads)


def name_at_tokens(shape: str, tokens: int, all_tokens: int) -> str:
    """Return the name of the table of a shape at a number of tokens."""
    return shape if tokens == all_tokens else f"{shape}, {tokens} tokens"


def _names_at_tokens(
    shapes: Mapping[str, str], tokens: Mapping[str, int], all_tokens: int
) -> dict[str, dict[int, str]]:
    """Return names of each site's tables by number of tokens, a few of the numbers that reach sites of its shape."""
    reach: dict[str, set[int]] = {}
    for site, shape in shapes.items():
        reach.setdefault(shape, set()).add(tokens[site])
    points = {shape: pick_evenly(tuple(sorted(counts)), TOKEN_POINTS) for shape, counts in reach.items()}
    return {
        site: {count: name_at_tokens(shape, count, all_tokens) for count in points[shape]}
        for site, shape in shapes.items()
    }


def measure_tables(
    checkpoint: Checkpoint,
    method: Method,
    where: LatencyTarget,
    *,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
) -> LatencyTables:
    """Measure, or read from the cache, a table for each block shape and number of tokens, and the model's latency.

    Raises BadInput if a site of the model can't be timed alone.
    """
    model = checkpoint.model
    tokens, merges = tokens_that_enter(model), merges_with_tokens(model)
    unmerged = replace(checkpoint, model=traced_model.with_merging(model, None)) if merges else checkpoint
    with open_grids(unmerged.model, method, where) as grids:
        names = _names_at_tokens(grids.shapes, tokens, len(traced_model.token_kinds(model)))
        by_name = dict[str, Grid]()
        for site, at_tokens in names.items():
            for count, name in at_tokens.items():
                by_name[name] = by_name.get(name) or grids.of_site(name, site, count)
        merge_grids = {step: grids.of_merge(merge, entering) for step, (merge, entering) in merges.items()}
        by_name |= {grid.name: grid for grid in merge_grids.values()}
        wholes = {DENSE: checkpoint, ALL_TOKENS: unmerged} if merges else {DENSE: checkpoint}
        tables = grids.measured(by_name | {name: grids.of_model(each) for name, each in wholes.items()}, on_progress)
    return LatencyTables(
        by_name={name: tables[name][0] for name in by_name},
        names={site.name: names.get(site.name, {}) for site in sites_of(model).every},
        tokens=tokens,
        dense=tables[DENSE][0],
        merges={step: grid.name for step, grid in merge_grids.items()},
        all_tokens=tables[ALL_TOKENS][0] if merges else None,
        measured=sum(not cached for _, cached in tables.values()),
    )


def price_in_nanoseconds(curves: list[CostCurve], latency_ms: Callable[[str, int], float]) -> list[CostCurve]:
    """Return the curves with costs in nanoseconds, each less the cost of the site's fastest width."""
    priced = []
    for curve in curves:
        costs = [round(1e6 * latency_ms(curve.site, width)) for width in curve.widths]
        least = min(costs)
        priced.append(replace(curve, costs=tuple(cost - least for cost in costs), cost_now=costs[-1] - least))
    return priced


def price_in_time(curves: list[CostCurve], tables: LatencyTables, batch: int) -> tuple[list[CostCurve], int]:
    """Return the curves with costs in nanoseconds at one batch size, and the nanoseconds of the dense model.

    The latter is the sum of the blocks' times if that is larger. Raises BadInput if tables were measured while other
    programs had the machine.
    """
    all_tokens = {} if tables.all_tokens is None else {ALL_TOKENS: tables.all_tokens}
    refuse_disturbed({**tables.by_name, DENSE: tables.dense, **all_tokens})
    priced = price_in_nanoseconds(curves, lambda site, width: tables.latency_ms(site, width, batch))
    dense = round(1e6 * tables.dense.latency_ms(1, batch))
    alone = sum(curve.cost_now for curve in priced) + round(1e6 * tables.merging_ms(batch))
    # Inside the model a block can be faster than alone. The time that no block explains is a fixed cost.
    return priced, max(dense, alone)
