"""What calibrating and reducing cost, in bare forward passes over the same images.

    python -m benchmarks.speed.passes --output benchmarks/results/passes.json

Random weights and random images: the time doesn't depend on their values. Everything takes turns in one process, round
after round, and is timed in CPU seconds of all threads, opening, solving, closing and writing included; a figure is the
median over rounds of each round's own ratio. A pass is the faster of two: whole batches, or pieces of a few images.
Solving costs the same however many images there are, so the figures of `macs` and the loops fall with their number.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from calib import store
from calib.images import Images
from corp_deploy.families.family import input_ports
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.machine import versions
from corp_deploy.planning.execution import reduce_checkpoint
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.input_sets import images_for_model
from ground.files import write_json
from perf.timing.watch import cpu_name

PIECE = 4
SPARSITY = 0.5
BARE = ("bare, whole batches", f"bare, {PIECE} images at a time")
Work = Callable[[], object]
Samples = dict[str, dict[str, list[float]]]


def asked(row: str, share: float) -> ReduceOptions:
    """What a row's `reduce` is asked for: half of every width, or widths by site for a share of the MACs."""
    loop, by_site = "loop" in row, "macs" in row
    if by_site:
        return ReduceOptions(mlp=0.0, attn=0.0, macs=share, closed_loop=loop)
    return ReduceOptions(mlp=SPARSITY, attn=SPARSITY, closed_loop=loop)


ROWS = ("calibrate", "uniform", "macs", "loop", "macs and loop")


def bare(checkpoint: Checkpoint, images: Images, batch_size: int, piece: int) -> None:
    with torch.inference_mode():
        for batch in images.batches(batch_size):
            for part in batch.split(piece):
                checkpoint.model(part)


def work(checkpoint: Checkpoint, images: Images, batch_size: int, share: float, scratch: Path) -> dict[str, Work]:
    """Everything that can be timed, by name. The reductions start from moments that are there."""
    moments = scratch / "moments.safetensors"

    def calibrated() -> None:
        store.save_moments(calibrate(checkpoint, images, batch_size=batch_size), moments)

    def reduced(row: str) -> Work:
        return lambda: reduce_checkpoint(
            checkpoint,
            moments,
            asked(row, share),
            directory=scratch / row,
            images=images,
        )

    whole, pieces = (lambda piece=piece: bare(checkpoint, images, batch_size, piece) for piece in (batch_size, PIECE))
    return {BARE[0]: whole, BARE[1]: pieces, "calibrate": calibrated, **{row: reduced(row) for row in ROWS[1:]}}


def timed(runs: Mapping[str, Work], rounds: int) -> Samples:
    """CPU and wall seconds of every run in every round; odd rounds go backwards through the runs."""
    samples: Samples = {name: {"cpu_s": [], "wall_s": []} for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            runs[name]()
            samples[name]["cpu_s"].append(time.process_time() - cpu_s)
            samples[name]["wall_s"].append(time.perf_counter() - wall_s)
    return samples


def in_passes(samples: Samples, clock: str = "cpu_s") -> dict[str, float]:
    """Median over rounds of each run's time over that round's pass, which is the bare one of the smaller median."""
    base = min((samples[name][clock] for name in BARE), key=statistics.median)
    return {
        name: statistics.median(taken / one for taken, one in zip(of[clock], base, strict=True))
        for name, of in samples.items()
    }


def measured(
    name: str, kwargs: dict[str, Any], *, images: int, batch_size: int, share: float, rounds: int, rows: tuple[str, ...]
) -> dict[str, Any]:
    """The record's figures for one model."""
    torch.manual_seed(0)
    architecture = Architecture(name=name, kwargs=kwargs)
    checkpoint = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "images.npy"
        shape = input_ports(checkpoint.model)[0].shape
        np.save(path, np.random.default_rng(0).standard_normal((images, *shape), dtype=np.float32))
        every = work(checkpoint, images_for_model(checkpoint.model, path), batch_size, share, Path(scratch))
        for warm in (*BARE, "calibrate"):
            every[warm]()
        samples = timed({row: every[row] for row in (*BARE, *rows)}, rounds)
    return {
        "model": name,
        "model_kwargs": kwargs,
        "images": images,
        "batch_size": batch_size,
        "share_of_macs": share,
        "sparsity": SPARSITY,
        "samples": samples,
        "passes": in_passes(samples),
    }


def _rows(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    rows = tuple(value.split(","))
    if odd := [row for row in rows if row not in ROWS]:
        raise click.BadParameter(f"{', '.join(odd)}: expected some of {', '.join(ROWS)}")
    return rows


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", default="deit_small_patch16_224", show_default=True)
@click.option("--model-kwargs", type=json.loads, default="{}", show_default=True, help="JSON for timm.create_model.")
@click.option("--images", type=click.IntRange(8), default=64, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=0.6, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rows", callback=_rows, default=",".join(ROWS), show_default=True)
def main(
    output: Path,
    model: str,
    model_kwargs: dict[str, Any],
    images: int,
    batch_size: int,
    share: float,
    rounds: int,
    threads: int,
    rows: tuple[str, ...],
) -> None:
    torch.set_num_threads(threads)
    found = measured(model, model_kwargs, images=images, batch_size=batch_size, share=share, rounds=rounds, rows=rows)
    head = {"kind": "benchmarks/passes", "version": 1, "cpu": cpu_name(), "threads": threads, "versions": versions()}
    write_json(output, head | found)
    for name, passes in found["passes"].items():
        click.echo(f"{name}: {passes:.2f} passes")


if __name__ == "__main__":
    main()
