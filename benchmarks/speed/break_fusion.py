"""What fusion breaks do to a real builder: kernels, fused attention, bytes and memory of TensorRT-RTX plans.

    python -m benchmarks.speed.break_fusion --output benchmarks/results/break_fusion.json

Two blocks of a ViT-S in FP16, whole and with one place broken, built without a GPU; and what a plan for several targets
costs beside one for a single GPU. Nothing here is timed.
"""

import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from corp_deploy.proof.compatibility import build_priced
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from ground.files import write_json
from ground.records import json_from_record

KIND, VERSION = "benchmarks/break-fusion", 1
TARGETS = ("86", "89", "120")
BREAKS = ("", "blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.attn/Softmax", "blocks.*.attn/Softmax")
PROFILE = BatchProfile(smallest=1, tuned=8, largest=64)
COMPATIBLE = {"portable": (), "targets": ("75", "86", "89")}


def checkpoint(architecture: Architecture) -> Checkpoint:
    """Random weights: a builder fuses by shapes and types."""
    torch.manual_seed(0)
    return Checkpoint(model=dense_from_architecture(architecture).eval(), architecture=architecture, lineage={})


def row(graph: Path, target: str, site: str) -> dict[str, Any]:
    """One plan."""
    record = build_engine(graph, BuildOptions(backend="tensorrt-rtx", sms=(target,), profiles=(PROFILE,))).record
    return {
        "target": target,
        "break": site,
        "kernels": record.kernels,
        "fused_attention": list(record.fused_attention_sites or ()),
        "plan_bytes": record.plan_bytes,
        "device_memory_bytes": record.device_memory_bytes,
        "outputs": [port.name for port in record.outputs],
        "fusion_breaks": [port.name for port in record.fusion_breaks],
    }


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--depth", type=int, default=2, show_default=True)
def main(output: Path, depth: int) -> None:
    """Build every plan and write the record."""
    architecture = Architecture(name="vit_small_patch16_224", kwargs={"depth": depth, "num_classes": 10})
    model, rows, prices = checkpoint(architecture), [], {}
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        for site in BREAKS:
            export_checkpoint(model, graph, precision="fp16", breaks=[site] if site else [])
            rows += [row(graph, target, site) for target in TARGETS]
        export_checkpoint(model, graph, precision="fp16")
        for level, sms in COMPATIBLE.items():
            asked = BuildOptions(backend="tensorrt-rtx", sms=sms, profiles=(PROFILE,), compatibility=level)
            built = build_priced(graph, asked, Path(folder) / "model.plan").record
            prices[level] = json_from_record(built.compatibility)
    record = {"architecture": architecture.name, "depth": depth, "library_version": built.library_version}
    write_json(output, {"kind": KIND, "version": VERSION, **record, "rows": rows, "compatibility": prices})


if __name__ == "__main__":
    main()
