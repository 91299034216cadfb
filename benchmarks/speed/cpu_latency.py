"""ONNX Runtime on the CPU: DeiT-S and DeiT-B dense against 50 % joint sparsity, heads padded and square.

    python benchmarks/speed/cpu_latency.py --output benchmarks/results/cpu_latency.json

Weights are random: the time doesn't depend on their values. Dense and reduced run interleaved in one process, the dense
model against itself beside them; the record holds medians with intervals, throughput and the realised share.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from torch import nn

from corp_deploy.families import timm_vit as vit
from corp_deploy.families.architecture import Architecture
from corp_deploy.families.model_cost import macs
from corp_deploy.families.modules import replaced
from corp_deploy.families.widths import HeadGeometry, aligned_width
from corp_deploy.invocation.running import RunOptions
from corp_deploy.machine import versions
from corp_deploy.proof.speed import measure
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.views.speed import speed_record
from ground.files import write_json
from perf.timing.laps import Plan

SHARE_KEPT = 0.5
MODELS = {"DeiT-S": "deit_small_patch16_224", "DeiT-B": "deit_base_patch16_224"}


def halved(dense: Checkpoint, geometry: HeadGeometry) -> Checkpoint:
    """The same model at half the hidden channels and half the head width, weights not fitted."""
    modules: dict[str, nn.Module] = {}
    for mlp in vit.sites(dense.model).channels:
        hidden = aligned_width(mlp.width, SHARE_KEPT, 64)
        modules |= mlp.empty(hidden, output_bias=True)
    for part in vit.sites(dense.model).heads:
        width = aligned_width(part.qk, SHARE_KEPT, 16)
        v = width if geometry == "square" else part.v
        modules[part.name] = part.empty(qk=width, v=v, geometry=geometry)
    return replace(dense, model=replaced(dense.model, modules).eval())


def compared(name: str, geometry: HeadGeometry, batches: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    """One row a batch size for one model and head geometry."""
    architecture = Architecture(name=MODELS[name])
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    reduced = halved(dense, geometry)
    with tempfile.TemporaryDirectory() as scratch:
        graphs = Path(scratch) / "dense.onnx", Path(scratch) / "reduced.onnx"
        for checkpoint, path in zip((dense, reduced), graphs, strict=True):
            export_checkpoint(checkpoint, path, precision="fp32")
        bench = measure(*graphs, batches=batches, plan=plan, running=RunOptions(threads=2))
    share = macs(reduced.model) / macs(dense.model)
    return {
        "model": name,
        "heads": geometry,
        "macs_share": share,
        **speed_record(bench),
        "environment": bench.environment,
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--batches", default="1,2,4,8,16,32", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
def main(output: Path, models: str, batches: str, time_limit: float, rounds: int) -> None:
    """Measure and write the record."""
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    sizes = tuple(int(size) for size in batches.split(","))
    geometries: tuple[HeadGeometry, ...] = ("padded", "square")
    rows = [compared(name, geometry, sizes, plan) for name in models.split(",") for geometry in geometries]
    write_json(output, {"kind": "benchmarks/cpu-latency", "version": 1, "versions": versions(), "rows": rows})
    for row in rows:
        for line in row["rows"]:
            click.echo(f"{row['model']} {row['heads']} batch {line['batch']}: speed-up {line['speedup']}")


if __name__ == "__main__":
    main()
