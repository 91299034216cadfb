"""What widths cost in time on this machine: one block of each kind measured alone over a grid of widths.

Where tokens are merged away a block is measured at a few numbers of tokens, between which it is interpolated, each
merge as a layer of its own, and the whole model with all its tokens too.

A block is timed as its MLP or its attention, fed with tokens, through the same backend that the model will run on; of a
traced model as the segments of its program that a site stands in, the other sites there whole. The tables are cached
under the machine's fingerprint, so a second budget measures nothing: those of blocks by shape and structure, that of
the whole model by its digest.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports, sites_of
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import model_digest
from corp_deploy.traced.models.parts import STREAM, part_of, tokens_that_enter
from corp_deploy.traced.models.sites import Site
from corp_deploy.traced.models.token_merging import TokenMerge
from export.graph.to_onnx import onnx_from_model, save
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.timing.laps import Plan
from perf.timing.watch import environment, watching

from .curves import CostCurve
from .latency_of_tokens import POINTS as TOKEN_POINTS
from .latency_of_tokens import MergeAlone, latency_at, merge_name, merges_of, spread, stream_channels

Backend = Literal["onnxruntime", "torch"]
POINTS = 6
PLAN = Plan(block_ms=20.0, min_rounds=8, noise_rounds=0, warm_up_limit_s=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTarget:
    """What latency means here: the backend, the batch sizes, CPU threads, and where tables are kept."""

    backend: Backend
    batches: tuple[int, ...]
    cache: Path
    threads: int | None = None
    plan: Plan = PLAN


def refuse_disturbed(tables: Mapping[str, LatencyTable]) -> None:
    """Raise BadInput, by what was measured, where other programs had the CPU for too much of a measurement."""
    disturbed = [name for name, table in tables.items() if any(cell.disturbed for cell in table.cells)]
    if disturbed:
        raise BadInput(
            f"latency tables of {', '.join(disturbed)}: other programs had the machine while they were measured; "
            "delete the tables' directory and measure again when it is quiet"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables by kind and shape, which of them are each site's, by number of tokens, the tokens that reach it, and
    the model's own latency under width 1.

    `merges`: the table of every merge of tokens. `all_tokens`: the latency of a model that merges, with nothing merged.
    `of_segments`: whether a table is of more than its site alone, whose is what it takes above that at the narrowest.
    """

    by_name: dict[str, LatencyTable]
    names: dict[str, dict[int, str]]
    tokens: dict[str, int]
    dense: LatencyTable
    merges: dict[str, str]
    all_tokens: LatencyTable | None
    measured: int

    def refuse_disturbed(self) -> None:
        """Raise BadInput where other programs had the CPU for too much of a measurement."""
        named = {**self.by_name, "the dense model": self.dense}
        refuse_disturbed(
            named if self.all_tokens is None else named | {"the dense model with all tokens": self.all_tokens}
        )

    def latency_ms(self, site: str, size: int, batch: int) -> float:
        """Of a site's layer at this size and the tokens that reach it."""
        at = {tokens: self.by_name[name] for tokens, name in self.names[site].items()}
        return latency_at(at, self.tokens[site], size, batch)

    def merging_ms(self, batch: int) -> float:
        """Of all merges of tokens, each measured alone."""
        return sum(self.by_name[name].latency_ms(1, batch) for name in self.merges.values())

    def model_ms(self, batch: int) -> float:
        """Of the model with nothing merged."""
        return (self.all_tokens or self.dense).latency_ms(1, batch)


Inputs = tuple[Port, ...]
Outputs = tuple[OutputPort, ...]


def grid_of_merge(name: str, merge: TokenMerge, inputs: Inputs, where: LatencyTarget, scratch: Path) -> Grid:
    return Grid(
        name=name,
        open_width=lambda _: _runner(MergeAlone(merge), inputs, (STREAM,), where, scratch),
        inputs=inputs,
        widths=(1,),
        batches=where.batches,
    )


def grid_of_model(checkpoint: Checkpoint, where: LatencyTarget, scratch: Path) -> Grid:
    model = checkpoint.model
    inputs, outputs = input_ports(model), output_ports(model)
    return Grid(
        name=f"dense {checkpoint.architecture.name}",
        identity=_identity(checkpoint),
        open_width=lambda _: _runner(traced_model.exportable(model), inputs, outputs, where, scratch),
        inputs=inputs,
        widths=(1,),
        batches=where.batches,
    )


@dataclass(frozen=True, kw_only=True)  # without slots, so that what is found can be kept
class SiteGrids:
    """How the sites of a model that merges nothing are timed alone: by the segments of its program that a site stands
    in, one for all that stand alike in alike ones. Raises BadInput for a site that can't be narrower.
    """

    model: nn.Module
    method: Method
    where: LatencyTarget
    scratch: Path

    def _sizes(self, site: Site) -> tuple[int, ...]:
        return tuple(kind_of(site).offers(site, self.method))

    @cached_property
    def shapes(self) -> dict[str, str]:
        """By site, the same for those that take as long as each other; none where a constant is left, which takes no
        time, or a site stays.
        """
        shapes, names = dict[str, str](), dict[str, str]()
        for site in sites_of(self.model).every:
            if len(self._sizes(site)) > 1:
                outline = part_of(self.model, site, site.width).cost_signature
                name = f"{site.cost_signature}, as in {site.name}"
                shapes[site.name] = names.setdefault(outline, name)
        return shapes

    def grid(self, name: str, site: str, tokens: int, *, points: int = POINTS) -> Grid:
        own = sites_of(self.model).by_name[site]
        part = part_of(self.model, own, own.width, tokens)

        def open_width(size: int) -> ModuleRunner | OnnxRunner:
            module = part_of(self.model, own, size, tokens).module
            return _runner(module, part.inputs, part.outputs, self.where, self.scratch)

        return Grid(
            name=name,
            identity=part.cost_signature,
            open_width=open_width,
            inputs=part.inputs,
            widths=spread(self._sizes(own), points),
            batches=self.where.batches,
        )


def _names_at_tokens(
    shapes: Mapping[str, str], tokens: Mapping[str, int], all_tokens: int
) -> dict[str, dict[int, str]]:
    """By site the names of its tables, by a few of the numbers of tokens that reach sites of its shape."""
    reach: dict[str, set[int]] = {}
    for site, shape in shapes.items():
        reach.setdefault(shape, set()).add(tokens[site])
    points = {shape: spread(tuple(sorted(counts)), TOKEN_POINTS) for shape, counts in reach.items()}
    return {
        site: {count: shape if count == all_tokens else f"{shape}, {count} tokens" for count in points[shape]}
        for site, shape in shapes.items()
    }


def _runner(
    module: nn.Module, inputs: Inputs, outputs: Outputs, where: LatencyTarget, scratch: Path
) -> ModuleRunner | OnnxRunner:
    if where.backend == "torch":
        return ModuleRunner(module, threads=where.threads, inputs=inputs, outputs=outputs)
    path = Path(tempfile.mkdtemp(dir=scratch)) / "block.onnx"
    save(onnx_from_model(module, inputs, outputs, precision="fp32", metadata={}), path)
    return OnnxRunner(path, threads=where.threads)


def _identity(checkpoint: Checkpoint) -> str:
    """Which whole model was measured: its weights and its layers."""
    merging = traced_model.merging_of(checkpoint.model) or ""
    return f"{model_digest(checkpoint.model)} {checkpoint.model!r}{merging}"


def measure_tables(
    checkpoint: Checkpoint,
    method: Method,
    where: LatencyTarget,
    *,
    on_progress: Callable[[int, int], None] = lambda finished, total: None,
) -> Tables:
    """One table per distinct block shape and number of tokens, and the dense model's latency, from the cache where it
    holds them. Raises BadInput for a site of a traced model that can't be narrower.
    """
    model = checkpoint.model
    tokens, merges = tokens_that_enter(model), merges_of(model)
    unmerged = replace(checkpoint, model=traced_model.with_merging(model, None)) if merges else checkpoint
    of_merges: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, watching() as (watch, gpu):
        how: dict[str, Any] = {"described": environment(gpu), "watch": watch}
        at = Path(scratch)
        of_sites = SiteGrids(model=unmerged.model, method=method, where=where, scratch=at)
        grids = dict[str, Grid]()
        names = _names_at_tokens(of_sites.shapes, tokens, len(traced_model.token_kinds(model)))
        for site, at_tokens in names.items():
            for count, name in at_tokens.items():
                grids[name] = grids.get(name) or of_sites.grid(name, site, count)
        channels = stream_channels(model) if merges else 0
        for step, (merge, entering) in merges.items():
            of_merges[step] = name = merge_name(merge, entering, channels)
            inputs = (Port(name="tokens", shape=(entering, channels)),)
            grids[name] = grid_of_merge(name, merge, inputs, where, at)
        models = [checkpoint, unmerged] if merges else [checkpoint]
        every = [*grids.values(), *(grid_of_model(each, where, at) for each in models)]
        tables = list[tuple[LatencyTable, bool]]()
        for grid in every:
            tables.append(cached_table(grid, where.plan, where.cache, **how))
            on_progress(len(tables), len(every))
        found, wholes = dict(zip(grids, tables, strict=False)), tables[len(grids) :]
    return Tables(
        by_name={name: table for name, (table, _) in found.items()},
        names={site.name: names.get(site.name, {}) for site in sites_of(model).every},
        tokens=tokens,
        dense=wholes[0][0],
        merges=of_merges,
        all_tokens=wholes[1][0] if merges else None,
        measured=sum(not cached for _, cached in (*found.values(), *wholes)),
    )


def curves_in_time(curves: list[CostCurve], tables: Tables, batch: int) -> tuple[list[CostCurve], int]:
    """The curves with costs in nanoseconds at one batch size, and the dense model's latency in nanoseconds.

    Raises BadInput for tables that were measured while other programs had the machine.
    """
    tables.refuse_disturbed()
    priced = []
    for curve in curves:
        costs = tuple(round(1e6 * tables.latency_ms(curve.site, width, batch)) for width in curve.widths)
        least = min(costs)
        costs = tuple(cost - least for cost in costs)
        priced.append(replace(curve, costs=costs, cost_now=costs[-1]))
    dense = round(1e6 * tables.dense.latency_ms(1, batch))
    alone = sum(curve.costs[-1] for curve in priced) + round(1e6 * tables.merging_ms(batch))
    # Measured inside the model, a block can be faster than alone; what the blocks can't explain counts as fixed.
    return priced, max(dense, alone)
