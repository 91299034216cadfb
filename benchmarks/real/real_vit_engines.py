"""Reduced real encoders in ONNX Runtime on a CPU, and as TensorRT-RTX plans built without a GPU.

    make real
    python -m benchmarks.real.real_vit_engines --output benchmarks/results/real_vit_engines.json

Each model is one of real_vit.py's rows, made again. It is timed interleaved with the dense model in one process, on an
otherwise quiet machine. Plans are built of the FP16 graphs of both, and their kernels and fused attention counted.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import outputs, relative_errors
from benchmarks.real.encoder import METHODS, Encoder
from corp_deploy.families.counting import macs
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.speed import time_models
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.views.speed import speed_record
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import Missing
from perf.timing.laps import Plan

PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)
TARGET = "86"
VARIANTS = {"widths": "best, by site", "merging": "merging", "both": "merging and widths"}


def exported(encoder: Encoder, model: nn.Module, directory: Path) -> Path:
    """Write FP32 and FP16 graphs of a model."""
    directory.mkdir(exist_ok=True)
    checkpoint = replace(encoder.subject.dense, model=model)
    for precision in ("fp32", "fp16"):
        export_checkpoint(checkpoint, directory / f"{precision}.onnx", precision=precision)
    return directory


def engine(directory: Path) -> dict[str, Any] | None:
    """Count kernels and fused attention of the FP16 graph's plan; None if TensorRT-RTX is not installed."""
    try:
        options = BuildOptions(backend="tensorrt-rtx", profiles=(PROFILE,), sms=(TARGET,))
        built = build_engine(directory / "fp16.onnx", options).record
    except Missing as reason:
        click.echo(f"no engine: {reason}")
        return None
    own = {"library_version": built.library_version, "attention_sites": list(built.attention_sites)}
    return own | {"fused_attention": built.fused_attention, "kernels": built.kernels, "plan_bytes": built.plan_bytes}


def row_of(encoder: Encoder, method: str, share: float, scratch: Path, plan: Plan, threads: int) -> dict[str, Any]:
    """Reduce, judge, export, time and build one model."""
    chosen = next(each for each in METHODS if each.name == method)
    model, _ = encoder.reduced(chosen, share)
    directory = exported(encoder, model, scratch / "reduced")
    graphs = (folder / "fp32.onnx" for folder in (scratch / "dense", directory))
    bench = time_models(*graphs, batches=(1, 8, 32), plan=plan, running=RunOptions(threads=threads))
    return {
        "macs_share": macs(model) / macs(encoder.model),
        "class_error": relative_errors(outputs(model, encoder.subject.held_out), encoder.subject.answers)[0],
        "latency": speed_record(bench),
        "engine": engine(directory),
    }


@measures("benchmarks/real-vit-engines")
@click.option("--time-limit", type=float, default=120.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(bench: Bench, time_limit: float, rounds: int, threads: int) -> None:
    """Measure each model at two shares of the MACs."""
    torch.set_num_threads(threads)
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            encoder = Encoder.opened(Path(scratch), 512, 128)
        except Missing as reason:
            click.echo(f"skipped: {reason}")
            return
        bench.share(threads=threads)
        dense = exported(encoder, encoder.model, Path(scratch) / "dense")
        if "dense_engine" not in bench.record or bench.again:
            bench.record.set("dense_engine", engine(dense))
        for share in (0.8, 0.6):
            for name, method in VARIANTS.items():
                key = {"name": f"{name} at {share:g}"}
                bench.row(key, row_of, encoder, method, share, Path(scratch), plan, threads)


if __name__ == "__main__":
    main()
