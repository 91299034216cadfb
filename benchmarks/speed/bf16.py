"""Errors and TensorRT-RTX plans in FP16, BF16, and both of them mixed with FP32.

    make real    # optional: DINOv2 with its real weights
    python -m benchmarks.speed.bf16 --output benchmarks/results/bf16.json

Every graph is computed in its types (each result is rounded to its type, sums are in float32) and compared with the
model in float32. Plans are for SM86, built without a GPU. Mixed graphs keep the last two blocks in FP32. DeiT-S has
random weights and gets noise; the digits example gets its held-out digits, and DINOv2-S held-out photographs.
"""

import importlib.metadata
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import DIGITS, dinov2_checkpoint
from benchmarks.real.place import assembled
from benchmarks.speed.random_models import build_rtx, random_checkpoint
from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.proof.candidates import candidate_from_path, run_in_batches
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.onnx_file import export_checkpoint
from examples.digits.images import load_part
from ground.errors import Missing
from ground.feeds import feeds_from_array
from ground.precision import MIXED
from perf.parity.measures import measure_outputs
from perf.runners.module import ModuleRunner

PRECISIONS = ("fp32", "fp16", "mixed", "bf16", "mixed-bf16")
BATCH, KEPT_BLOCKS, TARGET = 16, 2, "86"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and images [N,3,H,W] that it was not fitted to."""

    name: str
    checkpoint: Checkpoint
    images: NDArray[np.float32]


def subjects(count: int) -> Iterator[Subject]:
    """Yield the models whose weights are on this machine."""
    digits = load_checkpoint(DIGITS)
    yield Subject(name="digits", checkpoint=digits, images=load_part("held-out").images)
    noise = np.random.default_rng(0).standard_normal((count, 3, 224, 224)).astype(np.float32)
    yield Subject(name="DeiT-S, random weights", checkpoint=random_checkpoint("deit_small_patch16_224"), images=noise)
    try:
        dinov2 = dinov2_checkpoint()
    except Missing as reason:
        click.echo(str(reason), err=True)
        return
    held = np.load(assembled() / "held.npy", mmap_mode="r")
    crops = np.ascontiguousarray(held[np.linspace(0, len(held) - 1, count).astype(int)])
    yield Subject(name="DINOv2-S/14", checkpoint=dinov2, images=crops)


def row(subject: Subject, precision: str, exact: NDArray[np.float32], folder: Path) -> dict[str, Any]:
    """Return a graph's error against the model in torch, and the figures of its plan."""
    checkpoint, path = subject.checkpoint, folder / f"model.{precision}.onnx"
    depth = traced_model.depth(checkpoint.model)
    kept = tuple(f"blocks.{index}" for index in range(depth - KEPT_BLOCKS, depth)) if precision in MIXED else ()
    export_checkpoint(checkpoint, path, precision=precision, keep_fp32=kept)
    (port,) = output_ports(checkpoint.model)
    feeds = feeds_from_array(subject.images, input_ports(checkpoint.model))
    with candidate_from_path(path).opened((port,)) as run:
        answers = run_in_batches(run, feeds, BATCH)[port.name]
    built = build_rtx(path, TARGET)
    return {
        "precision": precision,
        "opset": facts_of_onnx(path).opset,
        "kept_fp32": list(kept),
        "graph_bytes": path.stat().st_size,
        "relative_error": measure_outputs(exact, answers, role=port.role).relative_error,
        "same_class": float((answers.argmax(1) == exact.argmax(1)).mean()) if port.role == "logits" else None,
        "plan_bytes": built.plan_bytes,
        "kernels": built.kernels,
        "kernel_types": dict(built.kernel_types),
        "fused_attention": built.fused_attention,
        "attention_sites": len(built.attention_sites),
    }


def rows(subject: Subject) -> dict[str, Any]:
    """Return the rows of one model, one for each precision."""
    model = subject.checkpoint.model
    ports, feeds = output_ports(model), feeds_from_array(subject.images, input_ports(model))
    with ModuleRunner(model, inputs=input_ports(model), outputs=ports) as runner:
        exact = run_in_batches(runner, feeds, BATCH)[ports[0].name]
    with tempfile.TemporaryDirectory() as folder:
        found = [row(subject, precision, exact, Path(folder)) for precision in PRECISIONS]
    return {"images": len(subject.images), "rows": found}


@measures("benchmarks/bf16")
@click.option("--count", type=click.IntRange(min=BATCH), default=64, show_default=True, help="Images of 224 pixels.")
def main(bench: Bench, count: int) -> None:
    """Measure every model in every precision."""
    rtx = importlib.metadata.version("tensorrt-rtx")
    bench.share(target=TARGET, kept_blocks=KEPT_BLOCKS, tensorrt_rtx=rtx)
    for subject in subjects(count):
        bench.row({"model": subject.name}, rows, subject, part="models")


if __name__ == "__main__":
    main()
