"""The cost of calibrating and reducing, in bare forward passes over the same images.

    python -m benchmarks.speed.passes --output benchmarks/results/passes.json

Weights are random and images are noise. All runs take turns in one process, round after round, and are timed in CPU
seconds of all threads, including opening, solving, closing and writing. A figure is the median over rounds of the ratio
within a round. A pass is the faster of two: whole batches, or pieces of a few images. Solving costs the same for any
number of images, so the figures of `macs` and of the loops fall with this number.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness import Bench, measures
from benchmarks.speed.random_models import SPARSITY, random_checkpoint, save_noise
from calib import store
from calib.images import Images
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.execution import reduce_checkpoint
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model

PIECE = 4
BARE = ("bare, whole batches", f"bare, {PIECE} images at a time")
Work = Callable[[], object]
Samples = dict[str, dict[str, list[float]]]


ROWS = ("calibrate", "uniform", "macs", "loop", "macs and loop")


def asked(row: str, share: float) -> ReduceOptions:
    """Return the options of a row's `reduce`: half of every width, or widths by site for a share of the MACs."""
    loop = "loop" in row
    if "macs" in row:
        return ReduceOptions(mlp=0.0, attn=0.0, macs=share, closed_loop=loop)
    return ReduceOptions(mlp=SPARSITY, attn=SPARSITY, closed_loop=loop)


def bare(checkpoint: Checkpoint, images: Images, batch_size: int, piece: int) -> None:
    with torch.inference_mode():
        for batch in images.batches(batch_size):
            for part in batch.split(piece):
                checkpoint.model(part)


def work(checkpoint: Checkpoint, images: Images, batch_size: int, share: float, scratch: Path) -> dict[str, Work]:
    """Return every run by name. The reductions start from the moments that the last calibration wrote."""
    moments = scratch / "moments.safetensors"

    def calibrated() -> None:
        store.save_moments(calibrate(checkpoint, images, batch_size=batch_size), moments)

    def reduced(row: str) -> Work:
        return lambda: reduce_checkpoint(checkpoint, moments, asked(row, share), directory=scratch / row, images=images)

    whole, pieces = (lambda piece=piece: bare(checkpoint, images, batch_size, piece) for piece in (batch_size, PIECE))
    return {BARE[0]: whole, BARE[1]: pieces, "calibrate": calibrated, **{row: reduced(row) for row in ROWS[1:]}}


def timed(runs: Mapping[str, Work], rounds: int) -> Samples:
    """Return CPU and wall seconds of every run in every round; odd rounds go backwards through the runs."""
    samples: Samples = {name: {"cpu_s": [], "wall_s": []} for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            runs[name]()
            samples[name]["cpu_s"].append(time.process_time() - cpu_s)
            samples[name]["wall_s"].append(time.perf_counter() - wall_s)
    return samples


def in_passes(samples: Samples, clock: str = "cpu_s") -> dict[str, float]:
    """Return the median over rounds of each run's time over the pass of this round.

    The pass is the bare one with the smaller median.
    """
    base = min((samples[name][clock] for name in BARE), key=statistics.median)
    return {
        name: statistics.median(taken / one for taken, one in zip(of[clock], base, strict=True))
        for name, of in samples.items()
    }


def measured(
    checkpoint: Checkpoint, *, images: int, batch_size: int, share: float, rounds: int, rows: Sequence[str]
) -> dict[str, Any]:
    """Return the seconds of all runs of one model, and their ratios to a pass."""
    with tempfile.TemporaryDirectory() as scratch:
        path = save_noise(checkpoint.model, images, Path(scratch) / "images.npy")
        every = work(checkpoint, images_for_model(checkpoint.model, path), batch_size, share, Path(scratch))
        for warm in (*BARE, "calibrate"):
            every[warm]()
        samples = timed({row: every[row] for row in (*BARE, *rows)}, rounds)
    return {"samples": samples, "passes": in_passes(samples)}


@measures("benchmarks/passes")
@click.option("--model", default="deit_small_patch16_224", show_default=True)
@click.option("--model-kwargs", type=json.loads, default="{}", show_default=True, help="JSON for timm.create_model.")
@click.option("--images", type=click.IntRange(8), default=64, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=0.6, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(
    bench: Bench, model: str, model_kwargs: dict[str, Any], share: float, rounds: int, threads: int, **sizes: int
) -> None:
    """Time every run."""
    torch.set_num_threads(threads)
    facts = {"model": model, "model_kwargs": model_kwargs, "share_of_macs": share, "sparsity": SPARSITY}
    bench.share(threads=threads, **facts, **sizes)
    rows = [row for row in ROWS if bench.wanted({"row": row})]
    found = measured(random_checkpoint(model, **model_kwargs), share=share, rounds=rounds, rows=rows, **sizes)
    for name, value in found.items():
        bench.record.set(name, value)
    for name, passes in found["passes"].items():
        click.echo(f"{name}: {passes:.2f} passes")


if __name__ == "__main__":
    main()
