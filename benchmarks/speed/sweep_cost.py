"""What ten sparsities from one moments file cost, beside one whole solve and nine that reuse its eliminations.

    python -m benchmarks.speed.sweep_cost --output benchmarks/results/sweep_cost.json

DeiT-S with random weights: the time doesn't depend on their values. The one pass over the images is timed for scale; no
solve looks at an image. `ratio` is the whole sweep, its scoring on held-out images included, over (one whole solve +
nine solves); each is the median over rounds in which all are measured one after the other.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from calib.collect import collect
from calib.moments import Moments
from calib.store import load, save
from corp_deploy.families.family import input_ports, listened, sites_of
from corp_deploy.machine import versions
from corp_deploy.planning.curves import eliminations
from corp_deploy.planning.judging import scored_inputs
from corp_deploy.planning.sweep import SweepContext, sweep
from corp_deploy.planning.sweep_trials import SweepRequest
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.spec.architecture import Architecture
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.input_sets import images_for_model, lineage_of_model
from corp_deploy.traced.models.sites import calibration_taps
from ground.files import write_json

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.875)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def choices_at(sparsity: float) -> Method:
    return method_from_preset("best", mlp_sparsity=sparsity, attention_sparsity=sparsity)


def measured(model_name: str, kwargs: dict[str, Any], images: int, scored_images: int, rounds: int) -> dict[str, Any]:
    """The record's figures for one model."""
    architecture = Architecture(name=model_name, kwargs=kwargs)
    checkpoint = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    model = checkpoint.model
    shape = input_ports(model)[0].shape
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, *shape, generator=generator) for _ in range(images // 8)]
    start = time.perf_counter()
    lineage = lineage_of_model(model) | {"images": "generated"}
    moments = collect(listened(model), calibration_taps(model, sites_of(model)), batches, device="cpu", lineage=lineage)
    pass_seconds = time.perf_counter() - start
    held_out = torch.randn(scored_images, *shape, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        swept = _swept(checkpoint, moments, held_out, Path(folder))
        return _timed(model_name, swept, moments, rounds) | {
            "images": images,
            "scored_images": scored_images,
            "pass_seconds": pass_seconds,
        }


def _swept(checkpoint: Checkpoint, moments: Moments, held_out: torch.Tensor, folder: Path) -> SweepContext:
    """As the command opens them."""
    save(moments, folder / "m.safetensors")
    np.save(folder / "held-out.npy", held_out.numpy())
    source = images_for_model(checkpoint.model, folder / "held-out.npy")
    return SweepContext(
        dense=checkpoint,
        moments=(folder / "m.safetensors",),
        statistics=(load(folder / "m.safetensors"),),
        source=source,
        scored=scored_inputs(checkpoint.model, source, None, 8),
    )


def _timed(model_name: str, swept: SweepContext, moments: Moments, rounds: int) -> dict[str, Any]:
    model = swept.dense.model
    wanted = [SweepRequest(preset="best", method=choices_at(sparsity)) for sparsity in SPARSITIES]
    found = []
    for _ in range(rounds):
        known = eliminations(model, moments, wanted[0].method)
        one = seconds(partial(reduce, model, moments, wanted[0].method))
        nine = sum(seconds(partial(reduce, model, moments, each.method, eliminations=known)) for each in wanted[1:])
        apart = one + sum(seconds(partial(reduce, model, moments, each.method)) for each in wanted[1:])
        whole = seconds(partial(sweep, swept, wanted))
        found.append({"one": one, "nine": nine, "ten_apart": apart, "sweep": whole})
    return {
        "model": model_name,
        "sparsities": SPARSITIES,
        "rounds": found,
        "ratio": statistics.median(row["sweep"] / (row["one"] + row["nine"]) for row in found),
        "of_ten_apart": statistics.median(row["sweep"] / row["ten_apart"] for row in found),
    }


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--model", default="deit_small_patch16_224", show_default=True)
@click.option("--images", type=click.IntRange(8), default=32, show_default=True)
@click.option("--scored", type=click.IntRange(1), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(output: Path, model: str, images: int, scored: int, rounds: int, threads: int) -> None:
    """Measure and write the record."""
    torch.set_num_threads(threads)
    found = measured(model, {}, images, scored, rounds)
    record = {"kind": "benchmarks/sweep-cost", "version": 1, "threads": threads, "versions": versions(), **found}
    write_json(output, record)
    click.echo(
        f"ten sparsities: {found['ratio']:.2f} of one whole solve and nine, {found['of_ten_apart']:.2f} of ten apart"
    )


if __name__ == "__main__":
    main()
