"""What widths cost in time on this machine: one block of each kind measured alone over a grid of widths.

A block is timed as its MLP or its attention, fed with tokens, through the same backend that the model will run on. The
tables are cached under the machine's fingerprint, so a second budget measures nothing: those of blocks by shape and
structure, that of the whole model by its digest.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.widths import HeadWidths, aligned_widths, geometry_of_heads, head_widths
from corp_deploy.reduction.method import Method
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.inputs import model_digest
from export.graph.to_onnx import onnx_from_model, save
from ground.errors import BadInput
from ground.ports import LOGITS, image_port
from perf.bench.latency_table import Grid, LatencyTable, cached_table
from perf.runners.module import ModuleRunner
from perf.runners.onnx import OnnxRunner
from perf.timing.environment import environment
from perf.timing.laps import Plan
from perf.timing.watch import watching

from .budget import Offer
from .probe import Width

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


class TokensAlone(nn.Module):
    """A layer of a block as a model of its own: [B,1,N,C] -> [B,C], the first token's output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the layer on the tokens of each image."""
        out: Tensor = self.layer(tokens[:, 0])[:, 0]
        return out


def _own(module: nn.Module) -> str:
    """The kinds of layers in a block beside the linear ones, which its widths tell of."""
    plain = (nn.Linear, nn.Identity, nn.Dropout)
    kinds = [type(leaf).__name__ for leaf in module.modules() if not list(leaf.children())]
    return "".join(f", {kind}" for kind in dict.fromkeys(kinds) if kind not in {each.__name__ for each in plain})


def _name(part: vit.ChannelSite | vit.HeadSite, method: Method, block: nn.Module) -> str:
    own = _own(block)
    if isinstance(part, vit.ChannelSite):
        return f"mlp of {part.fc1.in_features} and {part.hidden}{own}"
    kept = ", Q/K kept" if part.keeps_qk else ""
    widths = f"{part.heads} heads of {part.qk} and {part.v}{kept}"
    return f"attention of {part.qkv.in_features}, {widths}, {method.geometry}{own}"


def _layer(part: vit.ChannelSite | vit.HeadSite, method: Method, model: nn.Module, width: int) -> nn.Module:
    """The layer at one width with random weights: time doesn't depend on their values."""
    torch.manual_seed(0)
    if isinstance(part, vit.ChannelSite):
        modules = vit.empty_mlp(part, hidden=width, output_bias=True)
        mlp = vit.replaced(model, dict(modules)).get_submodule(part.name)
        return mlp.eval()
    widths = head_widths(width, part.widths, method.geometry, keeps_qk=bool(part.keeps_qk))
    geometry = geometry_of_heads(widths, method.geometry)
    return vit.empty_attention(part, qk=widths.qk, v=widths.v, geometry=geometry, fused=False).eval()


def _spread(widths: tuple[int, ...]) -> tuple[int, ...]:
    """At most POINTS of the widths, evenly, both ends included."""
    if len(widths) <= POINTS:
        return widths
    picks = {round(place * (len(widths) - 1) / (POINTS - 1)) for place in range(POINTS)}
    return tuple(widths[pick] for pick in sorted(picks))


def _runner(
    module: nn.Module, shape: tuple[int, int, int], where: LatencyTarget, scratch: Path
) -> ModuleRunner | OnnxRunner:
    if where.backend == "torch":
        return ModuleRunner(module, threads=where.threads)
    path = Path(tempfile.mkdtemp(dir=scratch)) / "block.onnx"
    save(onnx_from_model(module, [image_port(shape)], [LOGITS], precision="fp32", metadata={}), path)
    return OnnxRunner(path, threads=where.threads)


def _identity(checkpoint: Checkpoint) -> str:
    """Which whole model was measured: its weights, its layers, and the head geometry that neither of them tells."""
    geometries = [part.geometry for part in vit.sites(checkpoint.model).attentions]
    return f"{model_digest(checkpoint.model)} {geometries} {checkpoint.model!r}"


def measure_tables(
    checkpoint: Checkpoint,
    method: Method,
    where: LatencyTarget,
    *,
    progress: Callable[[float, str], None] | None = None,
) -> Tables:
    """One table per distinct block shape, and the dense model's latency, from the cache where it holds them."""
    model, found = checkpoint.model, vit.sites(checkpoint.model)
    blocks = {part.name: model.get_submodule(part.name) for part in found.every}
    names = {part.name: _name(part, method, blocks[part.name]) for part in found.every}
    every: dict[str, vit.ChannelSite | vit.HeadSite] = {}
    for part in found.every:
        every.setdefault(names[part.name], part)
    tokens = vit.tokens(model)
    measured = 0
    by_name: dict[str, LatencyTable] = {}
    with tempfile.TemporaryDirectory() as scratch, watching() as (watch, gpu):
        how: dict[str, Any] = {"described": environment(gpu), "watch": watch, "progress": progress}
        at = Path(scratch)
        for name, part in every.items():
            mlp = isinstance(part, vit.ChannelSite)
            dim = part.fc1.in_features if isinstance(part, vit.ChannelSite) else part.qkv.in_features
            dense_width = part.hidden if isinstance(part, vit.ChannelSite) else part.size
            widths = _spread(aligned_widths(dense_width, method.align_hidden if mlp else method.align_head))

            def open_width(
                width: int, part: vit.ChannelSite | vit.HeadSite = part, dim: int = dim
            ) -> ModuleRunner | OnnxRunner:
                return _runner(TokensAlone(_layer(part, method, model, width)), (1, tokens, dim), where, at)

            grid = Grid(
                name=name,
                identity=repr(blocks[part.name]),
                open_width=open_width,
                input_shape=(1, tokens, dim),
                widths=widths,
                batches=where.batches,
            )
            by_name[name], cached = cached_table(grid, where.plan, where.cache, **how)
            measured += not cached
        shape = vit.input_spec(model).shape
        open_dense = partial(_runner, vit.exportable(model), shape, where, at)
        grid = Grid(
            name=f"dense {checkpoint.architecture.name}",
            identity=_identity(checkpoint),
            open_width=lambda _: open_dense(),
            input_shape=shape,
            widths=(1,),
            batches=where.batches,
        )
        dense, cached = cached_table(grid, where.plan, where.cache, **how)
    return Tables(by_name=by_name, names=names, dense=dense, measured=measured + (not cached))


def _size(part: vit.ChannelSite | vit.HeadSite, width: Width) -> int:
    if isinstance(part, vit.ChannelSite):
        assert isinstance(width, int), (part.name, width)
        return width
    assert isinstance(width, HeadWidths), (part.name, width)
    return width.v if part.keeps_qk else width.qk


def offers_in_time(
    sites: list[Offer], tables: Tables, checkpoint: Checkpoint, method: Method, batch: int
) -> tuple[list[Offer], int]:
    """The offers with costs in nanoseconds at one batch size, and the dense model's latency in nanoseconds.

    Raises BadInput for tables that were measured while other programs had the machine.
    """
    tables.refuse_disturbed()
    parts = {part.name: part for part in vit.sites(checkpoint.model).every}
    priced = []
    for offer in sites:
        part = parts[offer.site]
        table = tables.of(part.name)
        costs = tuple(round(1e6 * table.latency_ms(_size(part, width), batch)) for width in offer.widths)
        priced.append(replace(offer, costs=costs, cost_now=costs[-1]))
    dense = round(1e6 * tables.dense.latency_ms(1, batch))
    alone = sum(offer.costs[-1] for offer in priced)
    # Measured inside the model, a block can be faster than alone; what the blocks can't explain counts as fixed.
    return priced, max(dense, alone)
