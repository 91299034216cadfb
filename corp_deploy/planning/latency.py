"""What widths cost in time on this machine: one block of each kind measured alone over a grid of widths.

A block is timed as its MLP or its attention, fed with tokens, through the same backend that the model will run on. The
tables are cached under the machine's fingerprint, so a second budget measures nothing: those of blocks by shape and
structure, that of the whole model by its digest.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from corp_deploy.families.family import family_of, input_ports, output_ports, sites_of
from corp_deploy.families.site import Site
from corp_deploy.reduction.kinds import kind_of
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import model_digest
from export.graph.to_onnx import onnx_from_model, save
from ground.errors import BadInput
from ground.ports import OutputPort, Port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.timing.environment import environment
from perf.timing.laps import Plan
from perf.timing.watch import watching

from .curves import CostCurve

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables by kind and shape, which of them each site's is, and the model's own latency under width 1."""

    by_name: dict[str, LatencyTable]
    names: dict[str, str]
    dense: LatencyTable
    measured: int

    def refuse_disturbed(self) -> None:
        """Raise BadInput where other programs had the CPU for too much of a measurement."""
        named = {**self.by_name, "the dense model": self.dense}
        disturbed = [name for name, table in named.items() if any(cell.disturbed for cell in table.cells)]
        if disturbed:
            raise BadInput(
                f"latency tables of {', '.join(disturbed)}: other programs had the machine while they were measured; "
                "delete the tables' directory and measure again when it is quiet"
            )

    def of(self, site: str) -> LatencyTable:
        return self.by_name[self.names[site]]


STREAM = OutputPort(name="stream", role="feature map")
Inputs = tuple[Port, ...]
Outputs = tuple[OutputPort, ...]


def _own(module: nn.Module) -> str:
    """The kinds of layers in a block beside the linear ones, which its widths tell of."""
    plain = (nn.Linear, nn.Identity, nn.Dropout)
    kinds = [type(leaf).__name__ for leaf in module.modules() if not list(leaf.children())]
    return "".join(f", {kind}" for kind in dict.fromkeys(kinds) if kind not in {each.__name__ for each in plain})


def _table_name(site: Site, method: Method, model: nn.Module) -> str:
    return f"{site.outline(method.geometry)}{_own(model.get_submodule(site.name))}"


def _grid_of_site(
    name: str, site: Site, method: Method, model: nn.Module, tokens: int, where: LatencyTarget, scratch: Path
) -> Grid:
    """A site's layer alone over its widths, with random weights: time doesn't depend on their values."""
    kind, layer = kind_of(site), model.get_submodule(site.name)
    by_size = {site.size_of(width): width for width in kind.widths(site, method)}
    inputs = (Port(name="tokens", shape=(tokens, site.first.in_features)),)

    def open_width(size: int) -> ModuleRunner | OnnxRunner:
        torch.manual_seed(0)
        return _runner(kind.layer(site, layer, method, by_size[size]), inputs, (STREAM,), where, scratch)

    return Grid(
        name=name,
        identity=repr(layer),
        open_width=open_width,
        inputs=inputs,
        widths=_spread(tuple(by_size)),
        batches=where.batches,
    )


def _spread(widths: tuple[int, ...]) -> tuple[int, ...]:
    """At most POINTS of the widths, evenly, both ends included."""
    if len(widths) <= POINTS:
        return widths
    picks = {round(place * (len(widths) - 1) / (POINTS - 1)) for place in range(POINTS)}
    return tuple(widths[pick] for pick in sorted(picks))


def _runner(
    module: nn.Module, inputs: Inputs, outputs: Outputs, where: LatencyTarget, scratch: Path
) -> ModuleRunner | OnnxRunner:
    if where.backend == "torch":
        return ModuleRunner(module, threads=where.threads, inputs=inputs, outputs=outputs)
    path = Path(tempfile.mkdtemp(dir=scratch)) / "block.onnx"
    save(onnx_from_model(module, inputs, outputs, precision="fp32", metadata={}), path)
    return OnnxRunner(path, threads=where.threads)


def _identity(checkpoint: Checkpoint) -> str:
    """Which whole model was measured: its weights, its layers, and the head geometry that neither of them tells."""
    geometries = [site.geometry for site in sites_of(checkpoint.model).heads]
    return f"{model_digest(checkpoint.model)} {geometries} {checkpoint.model!r}"


def measure_tables(
    checkpoint: Checkpoint,
    method: Method,
    where: LatencyTarget,
    *,
    progress: Callable[[float, str], None] | None = None,
) -> Tables:
    """One table per distinct block shape, and the dense model's latency, from the cache where it holds them."""
    model = checkpoint.model
    family = family_of(model)
    sites, tokens = family.sites(model), len(family.token_kinds(model))
    names = {site.name: _table_name(site, method, model) for site in sites.every}
    distinct: dict[str, Site] = {}
    for site in sites.every:
        distinct.setdefault(names[site.name], site)
    measured = 0
    by_name: dict[str, LatencyTable] = {}
    with tempfile.TemporaryDirectory() as scratch, watching() as (watch, gpu):
        how: dict[str, Any] = {"described": environment(gpu), "watch": watch, "progress": progress}
        at = Path(scratch)
        for name, site in distinct.items():
            grid = _grid_of_site(name, site, method, model, tokens, where, at)
            by_name[name], cached = cached_table(grid, where.plan, where.cache, **how)
            measured += not cached
        inputs, outputs = input_ports(model), output_ports(model)
        grid = Grid(
            name=f"dense {checkpoint.architecture.name}",
            identity=_identity(checkpoint),
            open_width=lambda _: _runner(family.exportable(model), inputs, outputs, where, at),
            inputs=inputs,
            widths=(1,),
            batches=where.batches,
        )
        dense, cached = cached_table(grid, where.plan, where.cache, **how)
    return Tables(by_name=by_name, names=names, dense=dense, measured=measured + (not cached))


def curves_in_time(
    curves: list[CostCurve], tables: Tables, checkpoint: Checkpoint, batch: int
) -> tuple[list[CostCurve], int]:
    """The curves with costs in nanoseconds at one batch size, and the dense model's latency in nanoseconds.

    Raises BadInput for tables that were measured while other programs had the machine.
    """
    tables.refuse_disturbed()
    sites = sites_of(checkpoint.model).by_name
    priced = []
    for curve in curves:
        table, size_of = tables.of(curve.site), sites[curve.site].size_of
        costs = tuple(round(1e6 * table.latency_ms(size_of(width), batch)) for width in curve.widths)
        priced.append(replace(curve, costs=costs, cost_now=costs[-1]))
    dense = round(1e6 * tables.dense.latency_ms(1, batch))
    alone = sum(curve.costs[-1] for curve in priced)
    # Measured inside the model, a block can be faster than alone; what the blocks can't explain counts as fixed.
    return priced, max(dense, alone)
