"""Kernels, fused attention, bytes and memory of TensorRT-RTX plans with fusion breaks, and for several targets.

    python -m benchmarks.speed.break_fusion --output benchmarks/results/break_fusion.json

The model has two blocks of a ViT-S in FP16 with random weights. Its plans are built without a GPU, without a break and
with a break at one place. A plan for several targets is compared with a plan for each of them. Nothing is timed.
"""

import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import build_rtx, random_checkpoint
from corp_deploy.proof.compatibility import build_priced
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.options import BatchProfile, BuildOptions
from ground.records import json_from_record

TARGETS = ("86", "89", "120")
BREAKS = ("", "blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.attn/Softmax", "blocks.*.attn/Softmax")
COMPATIBLE = {"portable": (), "targets": ("75", "86", "89")}


def row_of(checkpoint: Checkpoint, target: str, site: str, graph: Path) -> dict[str, Any]:
    """Build a plan with a fusion break at a site, or without a break."""
    export_checkpoint(checkpoint, graph, precision="fp16", breaks=[site] if site else [])
    record = build_rtx(graph, target)
    return {
        "kernels": record.kernels,
        "fused_attention": list(record.fused_attention_sites or ()),
        "plan_bytes": record.plan_bytes,
        "device_memory_bytes": record.device_memory_bytes,
        "outputs": [port.name for port in record.outputs],
        "fusion_breaks": [port.name for port in record.fusion_breaks],
    }


def compare_targets(bench: Bench, checkpoint: Checkpoint, graph: Path) -> None:
    """Compare one plan for several targets with a plan for each, at each level of compatibility."""
    export_checkpoint(checkpoint, graph, precision="fp16")
    prices = {}
    for level, sms in COMPATIBLE.items():
        profile = BatchProfile.from_text("1:8:64")
        options = BuildOptions(backend="tensorrt-rtx", sms=sms, profiles=(profile,), compatibility=level)
        record = build_priced(graph, options, graph.with_suffix(".plan")).record
        prices[level] = json_from_record(record.compatibility)
    bench.record.set("library_version", record.library_version)
    bench.record.set("compatibility", prices)


@measures("benchmarks/break-fusion")
@click.option("--depth", type=int, default=2, show_default=True)
def main(bench: Bench, depth: int) -> None:
    """Build every plan."""
    checkpoint = random_checkpoint("vit_small_patch16_224", depth=depth, num_classes=10)
    bench.share(architecture=checkpoint.architecture.name, depth=depth)
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        for site in BREAKS:
            for target in TARGETS:
                bench.row({"target": target, "break": site}, row_of, checkpoint, target, site, graph)
        if bench.again or "compatibility" not in bench.record:
            compare_targets(bench, checkpoint, graph)


if __name__ == "__main__":
    main()
