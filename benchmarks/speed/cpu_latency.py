"""ONNX Runtime on the CPU: DeiT-S and DeiT-B dense against 50 % joint sparsity, heads padded and square.

    python -m benchmarks.speed.cpu_latency --output benchmarks/results/cpu_latency.json

Dense and reduced model are interleaved in one process, and the dense model is also timed against itself. The record
holds medians with intervals, throughput and the realised share.
"""

from itertools import product
from typing import Any

import click

from benchmarks.harness import Bench, measures
from benchmarks.quality.timm_sites import graph_macs
from benchmarks.speed.random_models import halved, random_checkpoint, time_pair
from corp_deploy.spec.widths import HeadGeometry
from corp_deploy.views.speed import speed_record
from perf.timing.laps import Plan

MODELS = {"DeiT-S": "deit_small_patch16_224", "DeiT-B": "deit_base_patch16_224"}
GEOMETRIES: tuple[HeadGeometry, ...] = ("padded", "square")


def compared(name: str, geometry: HeadGeometry, batches: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    """Time one model and head geometry, with a line for each batch size."""
    dense = random_checkpoint(MODELS[name])
    reduced = halved(dense, geometry)
    bench = time_pair(dense, reduced, batches, plan)
    share = graph_macs(reduced.model) / graph_macs(dense.model)
    return {"macs_share": share, **speed_record(bench), "environment": bench.environment}


@measures("benchmarks/cpu-latency")
@click.option("--batches", default="1,2,4,8,16,32", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Least rounds per batch size.")
def main(bench: Bench, batches: str, time_limit: float, rounds: int) -> None:
    """Time every model and head geometry."""
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    sizes = tuple(map(int, batches.split(",")))
    for name, geometry in product(MODELS, GEOMETRIES):
        bench.row({"model": name, "heads": geometry}, compared, name, geometry, sizes, plan)


if __name__ == "__main__":
    main()
