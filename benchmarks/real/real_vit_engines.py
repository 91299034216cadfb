"""What engines make of reduced real encoders: ONNX Runtime on a CPU, and TensorRT-RTX plans built without a GPU.

    make real
    python -m benchmarks.real.real_vit_engines --output benchmarks/results/real_vit_engines.json

Each model is one of real_vit.py's rows, made anew by the same command. It is timed interleaved with the dense one in
one process, on an otherwise quiet machine; medians stand with their intervals, the dense model against itself beside
them. FP16 graphs of both become plans, whose kernels and fused attention are counted. A run goes on where another
stopped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.commands import run
from benchmarks.real.rows import METHODS
from benchmarks.real.subject import Calibration, Subject
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.speed import measure
from corp_deploy.views.speed import speed_record
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.errors import Missing
from perf.timing.laps import Plan

KIND = "benchmarks/real-vit-engines"
GRAPH, FP16 = "model.onnx", "model.fp16.onnx"
PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)
TARGET = "86"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A model to be timed: a method of the table at one share of the MACs."""

    name: str
    method: str
    share: float


VARIANTS = tuple(
    Variant(name=f"{name} at {share:g}", method=method, share=share)
    for share in (0.8, 0.6)
    for name, method in (
        ("widths", "best, by site"),
        ("merging", "merging"),
        ("both", "merging and widths"),
    )
)


def exported(words: list[str], directory: Path, threads: int) -> Path:
    """FP32 and FP16 graphs of a model."""
    directory.mkdir(parents=True, exist_ok=True)
    run(["export", *words, "--output", str(directory / GRAPH), "--precision", "fp32,fp16"], threads)
    return directory


def engine(directory: Path) -> dict[str, Any] | None:
    """Kernels and fused attention of the FP16 graph's plan; None where TensorRT-RTX is not installed."""
    try:
        options = BuildOptions(backend="tensorrt-rtx", profiles=(PROFILE,), sms=(TARGET,))
        built = build_engine(directory / FP16, options).record
    except Missing as reason:
        click.echo(f"no engine: {reason}")
        return None
    return {
        "library_version": built.library_version,
        "attention_sites": list(built.attention_sites),
        "fused_attention": built.fused_attention,
        "kernels": built.kernels,
        "plan_bytes": built.plan_bytes,
    }


def made(subject: Subject, calibration: Calibration, variant: Variant, dense: Path, plan: Plan) -> dict[str, Any]:
    """One model: reduced, judged, exported, timed and built."""
    (method,) = (method for method in METHODS if method.name == variant.method)
    directory = subject.work / "timed"
    row = subject.row(method, variant.share, calibration, directory=directory)
    exported(["--model", str(directory)], directory, subject.threads)
    running = RunOptions(threads=subject.threads)
    bench = measure(dense / GRAPH, directory / GRAPH, batches=(1, 8, 32), plan=plan, running=running)
    own = {name: row[name] for name in ("command", "macs_share", "class_error")}
    return {"name": variant.name, **own, "latency": speed_record(bench), "engine": engine(directory)}


@click.command(help=__doc__)
@click.option("--time-limit", type=float, default=120.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
@with_bench
def main(bench: Bench, *, time_limit: float, rounds: int) -> None:
    subject, record = bench.subject, bench.record(KIND)
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    dense = exported(subject.model_words, subject.work / "dense", subject.threads)
    if "dense_engine" not in record or bench.again:
        record.set("dense_engine", engine(dense))
    for variant in VARIANTS:
        if not bench.wanted(variant.name) or (record.has("rows", {"name": variant.name}) and not bench.again):
            continue
        record.put("rows", made(subject, bench.calibration, variant, dense, plan), ("name",))
        click.echo(f"{variant.name}: done")


if __name__ == "__main__":
    main()
