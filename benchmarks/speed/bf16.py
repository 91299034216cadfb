"""What sixteen bits cost: FP16, BF16 and both mixed with FP32, in error on held-out images and as TensorRT-RTX plans.

    make real    # optional: DINOv2 with its real weights
    python -m benchmarks.speed.bf16 --output benchmarks/results/bf16.json

Every graph is computed as it is typed (results rounded to its types, float32 between) and held against the model in
float32. Plans are for SM86, built without a GPU. Mixed graphs keep the last two blocks in FP32. DeiT-S has random
weights and sees noise; the digits' model is the example's own on its held-out digits; DINOv2-S sees photographs that
nothing was fitted to.
"""

import importlib.metadata
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.real.place import assembled
from benchmarks.real.weights import ARCHITECTURE as DINOV2
from corp_deploy.families import traced_model
from corp_deploy.families.family import input_ports, output_ports
from corp_deploy.machine import versions
from corp_deploy.proof.candidates import candidate_from_path, run_in_batches
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.graph_facts import facts_of_onnx
from corp_deploy.store.onnx_file import export_checkpoint
from examples.digits.images import load_part
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.feeds import feeds_from_array
from ground.files import write_json
from ground.precision import MIXED
from perf.parity.measures import measure_outputs
from perf.runners.module import ModuleRunner
from perf.timing.watch import cpu_name

KIND = "benchmarks/bf16"
PRECISIONS = ("fp32", "fp16", "mixed", "bf16", "mixed-bf16")
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"
BATCH, KEPT_BLOCKS, TARGET = 16, 2, "86"
PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and images [N,3,H,W] that nothing of it was fitted to."""

    name: str
    checkpoint: Checkpoint
    images: NDArray[np.float32]


def subjects(count: int) -> Iterator[Subject]:
    """Those whose weights are here."""
    digits = load_checkpoint(DIGITS)
    yield Subject(name="digits", checkpoint=digits, images=load_part("held-out").images)
    torch.manual_seed(0)
    deit = Architecture(name="deit_small_patch16_224", kwargs={})
    noise = np.random.default_rng(0).standard_normal((count, 3, 224, 224)).astype(np.float32)
    checkpoint = Checkpoint(model=dense_from_architecture(deit), architecture=deit, lineage={})
    yield Subject(name="DeiT-S, random weights", checkpoint=checkpoint, images=noise)
    ready = assembled()
    if not (ready / "dinov2_s.safetensors").is_file():
        click.echo(f"{ready}: no real weights here; `make real` brings them", err=True)
        return
    model = dense_from_architecture(DINOV2)
    model.load_state_dict(load_file(ready / "dinov2_s.safetensors"))
    held = np.load(ready / "held.npy", mmap_mode="r")
    crops = np.ascontiguousarray(held[np.linspace(0, len(held) - 1, count).astype(int)])
    yield Subject(
        name="DINOv2-S/14", checkpoint=Checkpoint(model=model.eval(), architecture=DINOV2, lineage={}), images=crops
    )


def row(subject: Subject, precision: str, exact: NDArray[np.float32], folder: Path) -> dict[str, Any]:
    """One graph: its error against the model in torch, and its plan."""
    checkpoint, path = subject.checkpoint, folder / f"model.{precision}.onnx"
    depth = traced_model.depth(checkpoint.model)
    kept = tuple(f"blocks.{index}" for index in range(depth - KEPT_BLOCKS, depth)) if precision in MIXED else ()
    export_checkpoint(checkpoint, path, precision=precision, keep_fp32=kept)
    (port,) = output_ports(checkpoint.model)
    feeds = feeds_from_array(subject.images, input_ports(checkpoint.model))
    with candidate_from_path(path).opened((port,)) as run:
        answers = run_in_batches(run, feeds, BATCH)[port.name]
    built = build_engine(path, BuildOptions(backend="tensorrt-rtx", profiles=(PROFILE,), sms=(TARGET,))).record
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


def rows(subject: Subject) -> list[dict[str, Any]]:
    """Every precision of one model."""
    model = subject.checkpoint.model
    ports = output_ports(model)
    with ModuleRunner(model, inputs=input_ports(model), outputs=ports) as runner:
        exact = run_in_batches(runner, feeds_from_array(subject.images, input_ports(model)), BATCH)[ports[0].name]
    with tempfile.TemporaryDirectory() as folder:
        return [row(subject, precision, exact, Path(folder)) for precision in PRECISIONS]


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--count", type=click.IntRange(min=BATCH), default=64, show_default=True, help="Images of 224 pixels.")
def main(output: Path, count: int) -> None:
    """Measure every model and write the record."""
    models = []
    for subject in subjects(count):
        found = rows(subject)
        models.append({"model": subject.name, "images": len(subject.images), "rows": found})
        for each in found:
            click.echo(f"{subject.name} {each['precision']}: {each['relative_error']:.2g}, {each['plan_bytes']} bytes")
    installed = versions() | {"tensorrt-rtx": importlib.metadata.version("tensorrt-rtx")}
    record = {"cpu": cpu_name(), "versions": installed, "target": TARGET, "kept_blocks": KEPT_BLOCKS}
    write_json(output, {"kind": KIND, "version": 1, **record, "models": models})


if __name__ == "__main__":
    main()
