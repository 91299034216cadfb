"""Fused attention, kernels, plan size and build time of TensorRT-RTX plans of DeiT-T/S/B by head geometry.

    python -m benchmarks.speed.engines --output benchmarks/results/engines.json

Weights are random, at the widths of 50 % joint sparsity: hidden channels, queries and keys are halved, and with
`square` heads the values too. Graphs are in FP16 with dynamic batches 1:8:64. Plans are built on the CPU, each one
twice: `same_plan` tells whether the bytes are equal. Times are the smaller ones of both builds. CPU seconds, of all
threads, are comparable when the machine does other work too.
"""

import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import build_rtx, halved, random_checkpoint
from corp_deploy.families import traced_model
from corp_deploy.families.counting import count_products
from corp_deploy.families.family import input_ports
from corp_deploy.spec.widths import HeadGeometry
from export.engine.record import EngineRecord
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.ports import LOGITS, image_port

MODELS = {"DeiT-T": "deit_tiny_patch16_224", "DeiT-S": "deit_small_patch16_224", "DeiT-B": "deit_base_patch16_224"}
VARIANTS: dict[str, HeadGeometry | None] = {"dense": None, "padded": "padded", "square": "square", "ragged": "ragged"}


def built(graph: Path, sm: str) -> tuple[EngineRecord, float]:
    """Return the record of a plan, and the CPU seconds to check the graph and to build the plan."""
    started = time.process_time()
    return build_rtx(graph, sm), time.process_time() - started


def row_of(name: str, variant: str, sm: str) -> dict[str, Any]:
    """Build one plan twice; sizes are in bytes, times in seconds, and `macs` are those of one image."""
    dense, geometry = random_checkpoint(MODELS[name]), VARIANTS[variant]
    model = dense.model if geometry is None else halved(dense, geometry).model
    exported = traced_model.exportable(model, geometry="ragged" if variant == "ragged" else None)
    graph = onnx_from_model(exported, [image_port((3, 224, 224))], [LOGITS], precision="fp16", metadata={})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save_onnx(graph, path)
        (first, first_cpu), (second, second_cpu) = built(path, sm), built(path, sm)
    return {
        "macs": count_products(exported, input_ports(model)).macs,
        "onnx_bytes": first.onnx_bytes,
        "plan_bytes": first.plan_bytes,
        "kernels": first.kernels,
        "fused_attention": first.fused_attention,
        "blocks": len(first.attention_sites),
        "half_kernel_share": first.half_kernel_share,
        "build_seconds": round(min(first.build_seconds, second.build_seconds), 2),
        "build_cpu_seconds": round(min(first_cpu, second_cpu), 2),
        "same_plan": first.plan_sha256 == second.plan_sha256,
        "library_version": first.library_version,
    }


@measures("engines")
@click.option("--sm", "sms", multiple=True, default=("86",), show_default=True, help="A target; repeatable.")
def main(bench: Bench, sms: tuple[str, ...]) -> None:
    """Build the plans of every model and head geometry."""
    for name, variant, sm in product(MODELS, VARIANTS, sms):
        bench.row({"model": name, "variant": variant, "sm": sm}, row_of, name, variant, sm)


if __name__ == "__main__":
    main()
