"""Whole heads against narrower ones: error and engines at like multiply-adds of the attention.

    python -m benchmarks.quality.whole_heads --output benchmarks/results/whole_heads.json

Preset best from one set of moments, attention alone reduced: some heads removed whole (`--whole-heads`, by OBS, and as
preset grail does), all heads narrower with their values (`--heads square`, the multiples of 8 below and above the same
multiply-adds), and narrower queries and keys alone, padded in the graph (the multiple of 8 nearest to them). Errors are
of the outputs for held-out images. FP16 graphs become TensorRT-RTX plans where its builder is installed.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import SUBJECTS, Subject, outputs, relative_errors
from benchmarks.quality.timm_sites import attentions, graph_macs
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.families.inspection import inspection_of_model
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import Widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.narrowing import at_widths
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import Missing

STEP = 8
PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to make attention smaller: a method, and the widths of every site where it does not settle them."""

    name: str
    method: Method
    size: int | None = None
    widths: Widths | None = None


def attention_macs(model: nn.Module) -> int:
    """Multiply-adds of all attentions, as `inspect` tells them."""
    sites = {name for each in attentions(model) for name in each.widths()}
    return sum(int(row["macs"]) for row in inspection_of_model(model)["sites"] if row["site"] in sites)


def everywhere(model: nn.Module, **widths: int) -> dict[str, int]:
    """Every attention at these widths."""
    return {name: width for each in attentions(model) for name, width in each.widths(**widths).items()}


def padded_macs(model: nn.Module, size: int) -> int:
    """With queries and keys of this size, padded in the graph."""
    return graph_macs(at_widths(model, everywhere(model, qk=size)))


def variants(model: nn.Module, left: int) -> Iterator[Variant]:
    """Those at about the multiply-adds of so many heads left."""
    first = attentions(model)[0]
    heads = {"heads_sparsity": 1.0 - left / first.heads}
    yield Variant(name="whole heads", method=method_from_preset("best", **heads))
    yield Variant(name="whole heads, grail", method=method_from_preset("grail", **heads))
    square = method_from_preset("best", attention_sparsity=0.0, geometry="square", align_head=STEP)
    below = int(first.qk * left / first.heads) // STEP * STEP
    exact = below * first.heads == first.qk * left
    for size in (below,) if exact else (below, below + STEP):
        if size:
            yield Variant(name="square", method=square, size=size, widths=everywhere(model, qk=size, v=size))
    saved = site_costs(model, "macs").saved(sites_of(model).every, everywhere(model, heads=left))
    aimed = macs(model) - saved
    nearest = min(range(STEP, first.qk, STEP), key=lambda size: abs(padded_macs(model, size) - aimed))
    padded = method_from_preset("best", attention_sparsity=0.0, align_head=STEP)
    yield Variant(name="padded Q/K", method=padded, size=nearest, widths=everywhere(model, qk=nearest))


def engine(model: nn.Module, scratch: Path) -> dict[str, Any] | None:
    """Kernels and fused attention of the FP16 graph's plan; None where TensorRT-RTX is not installed."""
    path = scratch / "model.fp16.onnx"
    checkpoint = Checkpoint(model=model, architecture=Architecture(name="reduced", kwargs={}), lineage={})
    export_checkpoint(checkpoint, path, precision="fp16")
    try:
        built = build_engine(path, BuildOptions(backend="tensorrt-rtx", profiles=(PROFILE,), sms=("86",))).record
    except Missing as reason:
        click.echo(f"no engine: {reason}")
        return None
    own = {"kernels": built.kernels, "plan_bytes": built.plan_bytes, "fused_attention": built.fused_attention}
    return own | {"attention_sites": len(built.attention_sites), "library_version": built.library_version}


def row_of(subject: Callable[[], Subject], variant: Variant, scratch: Path) -> dict[str, Any]:
    """Make, judge and build one model."""
    own = subject()
    dense = own.dense.model
    model = reduce(dense, own.moments, variant.method, widths=variant.widths).model
    first = attentions(model)[0]
    return {
        "heads": first.heads,
        "qk": first.qk,
        "v": first.v,
        "attention_macs": attention_macs(model) / attention_macs(dense),
        "macs": macs(model) / macs(dense),
        "error": relative_errors(outputs(model, own.held_out), own.answers)[0],
        "engine": None if variant.name == "whole heads, grail" else engine(model, scratch),
    }


@measures("benchmarks/whole-heads")
@click.option("--crops", type=click.IntRange(min=16), default=128, show_default=True, help="Of photographs.")
def main(bench: Bench, crops: int) -> None:
    """Measure and write the record, again after each row."""
    torch.set_num_threads(1)
    bench.share(crops=crops)
    for name, sizes in (("digits", (1297, 500)), ("DINOv2-S", (crops, max(crops // 4, 32)))):
        with tempfile.TemporaryDirectory() as scratch:
            subject = cache(partial(SUBJECTS[name], Path(scratch), *sizes))
            try:
                model = subject().dense.model
            except Missing as reason:
                click.echo(f"{name}: skipped, {reason}", err=True)
                continue
            heads = attentions(model)[0].heads
            for left in sorted({round(heads * 2 / 3), round(heads / 2 - 0.1)}, reverse=True):
                for variant in variants(model, left):
                    key = {"model": name, "left": left, "way": variant.name, "asked": variant.size}
                    bench.row(key, row_of, subject, variant, Path(scratch))


if __name__ == "__main__":
    main()
