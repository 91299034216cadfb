"""What head geometry does to an engine: fused attention, kernels, plan size and build time of DeiT-T/S/B.

    python -m benchmarks.speed.engines --output benchmarks/results/engines.json

Random weights at the widths of 50 % joint sparsity (hidden and q/k halved; `square` halves v too), FP16 ONNX, dynamic
batch 1:8:64, TensorRT-RTX on the CPU for each --sm. Every plan is built twice: `same_plan` says whether the bytes were
equal. Writes the JSON and, beside it, the same table as Markdown. Times are the smaller of the two builds; CPU seconds
are what to compare when the machine has other work.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import timm
import torch
from torch import nn

from benchmarks.speed.cpu_latency import halved
from corp_deploy.families import traced_model
from corp_deploy.families.counting import count_products
from corp_deploy.families.family import input_ports
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from export.engine.build import build_engine
from export.engine.options import BatchProfile, BuildOptions
from export.engine.record import EngineRecord
from export.engine.session import open_library
from export.graph.to_onnx import onnx_from_model, save_onnx
from ground.ports import LOGITS, image_port

MODELS = {"DeiT-T": "deit_tiny_patch16_224", "DeiT-S": "deit_small_patch16_224", "DeiT-B": "deit_base_patch16_224"}
VARIANTS = ("dense", "padded", "square", "ragged")
BATCH = BatchProfile(smallest=1, tuned=8, largest=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine; sizes in bytes, times in seconds, `macs` of the model for one image."""

    model: str
    variant: str
    sm: str
    macs: int
    onnx_bytes: int
    plan_bytes: int
    kernels: int | None
    fused_attention: int | None
    blocks: int
    half_kernel_share: float | None
    build_seconds: float
    build_cpu_seconds: float
    same_plan: bool


def model_of(name: str, variant: str) -> nn.Module:
    torch.manual_seed(0)
    architecture = Architecture(name=MODELS[name])
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    if variant == "dense":
        return dense.model
    assert variant in ("padded", "square", "ragged"), variant
    return halved(dense, variant).model  # type: ignore[arg-type]


def built(path: Path, method: BuildOptions) -> tuple[EngineRecord, float]:
    """The record, and the CPU seconds of all threads (reading and checking the graph included)."""
    started = time.process_time()
    return build_engine(path, method).record, time.process_time() - started


def rows_of(name: str, variant: str, sms: list[str], folder: Path) -> list[Row]:
    model = model_of(name, variant)
    path = folder / f"{name}-{variant}.onnx"
    exported = traced_model.exportable(model, geometry="ragged" if variant == "ragged" else None)
    save_onnx(onnx_from_model(exported, [image_port((3, 224, 224))], [LOGITS], precision="fp16", metadata={}), path)
    rows = []
    for sm in sms:
        method = BuildOptions(backend="tensorrt-rtx", profiles=(BATCH,), sms=(sm,))
        (first, first_cpu), (second, second_cpu) = built(path, method), built(path, method)
        rows.append(
            Row(
                model=name,
                variant=variant,
                sm=sm,
                macs=count_products(exported, input_ports(model)).macs,
                onnx_bytes=first.onnx_bytes,
                plan_bytes=first.plan_bytes,
                kernels=first.kernels,
                fused_attention=first.fused_attention,
                blocks=len(first.attention_sites),
                half_kernel_share=first.half_kernel_share,
                build_seconds=round(min(first.build_seconds, second.build_seconds), 2),
                build_cpu_seconds=round(min(first_cpu, second_cpu), 2),
                same_plan=first.plan_sha256 == second.plan_sha256,
            )
        )
    return rows


def markdown(rows: list[Row], library_version: str) -> str:
    lines = [
        f"Engines by TensorRT-RTX {library_version}, FP16, batch {BATCH}, built on a CPU with {os.cpu_count()} cores.",
        "",
        "| model | heads | SM | GMAC | fused attention | kernels | plan MB | build s | CPU s | same bytes twice |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fused, same = f"{row.fused_attention} of {row.blocks}", "yes" if row.same_plan else "no"
        lines.append(
            f"| {row.model} | {row.variant} | {row.sm} | {row.macs / 1e9:.2f} | {fused} | {row.kernels} "
            f"| {row.plan_bytes / 1e6:.1f} | {row.build_seconds:.1f} | {row.build_cpu_seconds:.1f} | {same} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--models", default="DeiT-T,DeiT-S,DeiT-B", help="which models, separated by commas")
    parser.add_argument("--sm", action="append", help="target, repeatable; default 86")
    arguments = parser.parse_args()
    library = open_library("tensorrt-rtx")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            for variant in VARIANTS:
                rows += rows_of(name, variant, arguments.sm or ["86"], Path(folder))
                print(rows[-1])
    versions = {"tensorrt_rtx": library.version, "torch": torch.__version__, "timm": timm.__version__}
    content = {
        "version": 1,
        "kind": "engines",
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "versions": versions},
        "batch": str(BATCH),
        "rows": [asdict(row) for row in rows],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(content, indent=2) + "\n")
    arguments.output.with_suffix(".md").write_text(markdown(rows, library.version))


if __name__ == "__main__":
    main()
