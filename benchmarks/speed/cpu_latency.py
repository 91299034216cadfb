"""ONNX Runtime on the CPU: DeiT-S and DeiT-B dense against 50 % joint sparsity, heads padded and square.

    python -m benchmarks.speed.cpu_latency --output benchmarks/results/cpu_latency.json

Weights are random: the time doesn't depend on their values. Dense and reduced run interleaved in one process, the dense
model against itself beside them; the record holds medians with intervals, throughput and the realised share.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.quality.timm_sites import graph_macs
from corp_deploy.invocation.running import RunOptions
from corp_deploy.machine import versions
from corp_deploy.proof.speed import time_models
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.views.speed import speed_record
from ground.files import write_json
from perf.timing.laps import Plan

SPARSITY = 0.5
MODELS = {"DeiT-S": "deit_small_patch16_224", "DeiT-B": "deit_base_patch16_224"}


def halved(dense: Checkpoint, geometry: HeadGeometry) -> Checkpoint:
    """The same model at half the hidden channels and half the head width, weights not fitted."""
    method = method_from_preset("best", mlp_sparsity=SPARSITY, attention_sparsity=SPARSITY, geometry=geometry)
    return replace(dense, model=at_widths(dense.model, uniform_widths(dense.model, method)))


def compared(name: str, geometry: HeadGeometry, batches: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    """One row a batch size for one model and head geometry."""
    architecture = Architecture(name=MODELS[name])
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    reduced = halved(dense, geometry)
    with tempfile.TemporaryDirectory() as scratch:
        graphs = Path(scratch) / "dense.onnx", Path(scratch) / "reduced.onnx"
        for checkpoint, path in zip((dense, reduced), graphs, strict=True):
            export_checkpoint(checkpoint, path, precision="fp32")
        bench = time_models(*graphs, batches=batches, plan=plan, running=RunOptions(threads=2))
    share = graph_macs(reduced.model) / graph_macs(dense.model)
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
