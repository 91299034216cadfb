"""Convolutional networks: what methods lose on a trained ResNet at equal widths, and how much faster half the MACs are.

    python -m benchmarks.quality.convnets --output benchmarks/results/convnets.json

The first is the digits' ResNet, uniform widths, the same for every method, whose MACs have the share
that comes nearest to what was asked for; all numbers are on held-out images. The second is of shapes alone: random
weights, ONNX Runtime on the CPU, dense and reduced interleaved in one process.
"""

import tempfile
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.methods import logits
from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.counting import macs
from corp_deploy.invocation.running import RunOptions
from corp_deploy.proof.speed import time_models
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import LoopName, method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.spec.architecture import Architecture
from corp_deploy.spec.widths import Widths
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture
from corp_deploy.store.dense_model import model_of_directory
from corp_deploy.store.input_sets import images_for_model
from corp_deploy.store.onnx_file import export_checkpoint
from corp_deploy.traced.models.narrowed_model import at_widths
from corp_deploy.views.speed import speed_record
from examples.digits.images import load_part
from perf.timing.laps import Plan

DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "resnet"
REMOVED = (0.3, 0.5, 0.7)
SEEDS = (0, 1, 2)
CALIBRATION_IMAGES = 512
ALIGN = 4
SHAPES = {"ResNet-50": "resnet50", "MobileNetV2": "mobilenetv2_100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A preset in the open or in a closed loop."""

    name: str
    preset: str
    loop: LoopName | None = None


WAYS = (
    Way(name="none", preset="none"),
    Way(name="grail", preset="grail"),
    Way(name="grail, symmetric closed loop", preset="grail", loop="symmetric"),
    Way(name="best", preset="best"),
    Way(name="best, closed loop", preset="best", loop="asymmetric"),
)


def evenly(model: nn.Module, sparsity: float, align: int) -> Widths:
    """The same share of every site's channels."""
    return uniform_widths(model, method_from_preset("none", conv_sparsity=sparsity, align_conv=align))


def nearest(model: nn.Module, asked: float, align: int) -> tuple[Widths, float]:
    """Uniform widths that remove what of the model's MACs is nearest to the share asked for, and what they remove."""
    dense = macs(model)

    def removed(percent: int) -> float:
        return 1.0 - macs(at_widths(model, evenly(model, percent / 100, align))) / dense

    enough = bisect_left(range(99), asked, key=removed)
    percent = min((max(enough - 1, 0), enough), key=lambda each: abs(removed(each) - asked))
    return evenly(model, percent / 100, align), removed(percent)


def reduced(model: nn.Module, way: Way, widths: Widths, images: Images, moments: Moments) -> nn.Module:
    """By one way, at these widths."""
    method = method_from_preset(way.preset, align_conv=ALIGN)
    if way.loop == "symmetric":
        return reduce_traced(model, images, method, widths=widths).model
    if way.loop == "asymmetric":
        return reduce_traced(model, images, method, widths=widths, loop=Loop()).model
    return reduce(model, moments, method, widths=widths).model


def row_of(dense: Checkpoint, way: Way, widths: Widths, images: Images, moments: Moments) -> dict[str, float]:
    """Reduce by one way and judge on the held-out images."""
    held_out = load_part("held-out")
    pixels = torch.from_numpy(held_out.images)
    exact, answers = logits(dense.model, pixels), logits(reduced(dense.model, way, widths, images, moments), pixels)
    top = answers.argmax(dim=1)
    return {
        "relative_error": float((answers - exact).norm() / exact.norm()),
        "agreement": float((top == exact.argmax(dim=1)).double().mean()),
        "accuracy": float((top.numpy() == held_out.labels).mean()),
    }


def add_methods(bench: Bench, dense: Checkpoint, shares: tuple[float, ...], count: int) -> None:
    """Make the rows of every way at every share and seed."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "calibration.npy"
        np.save(path, load_part("train").images)
        for seed in SEEDS:
            images = images_for_model(dense.model, path, samples=count, seed=seed)
            moments = calibrate(dense, images, batch_size=32)
            for share in shares:
                widths, removed = nearest(dense.model, share, ALIGN)
                for way in WAYS:
                    key = {"asked": share, "way": way.name, "seed": seed, "removed_of_model": removed}
                    bench.row(key, row_of, dense, way, widths, images, moments)


def compared(name: str, asked: float, batches: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    """One shape dense beside reduced, a line a batch size."""
    torch.manual_seed(0)
    architecture = Architecture(name=SHAPES[name])
    dense = Checkpoint(model=dense_from_architecture(architecture), architecture=architecture, lineage={})
    widths, _ = nearest(dense.model, asked, 8)
    narrower = replace(dense, model=at_widths(dense.model, widths))
    with tempfile.TemporaryDirectory() as scratch:
        graphs = Path(scratch) / "dense.onnx", Path(scratch) / "reduced.onnx"
        for checkpoint, path in zip((dense, narrower), graphs, strict=True):
            export_checkpoint(checkpoint, path, precision="fp32")
        bench = time_models(*graphs, batches=batches, plan=plan, running=RunOptions(threads=2))
    share = macs(narrower.model) / macs(dense.model)
    return {"macs_share": share, **speed_record(bench), "environment": bench.environment}


@measures("benchmarks/convnets")
@click.option("--batches", default="1,8,32", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=6, show_default=True, help="Least rounds per batch size.")
def main(bench: Bench, batches: str, time_limit: float, rounds: int) -> None:
    """Measure both parts."""
    bench.share(calibration_images=CALIBRATION_IMAGES, align=ALIGN)
    add_methods(bench, model_of_directory(DIGITS), REMOVED, CALIBRATION_IMAGES)
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    sizes = tuple(int(size) for size in batches.split(","))
    for name in SHAPES:
        bench.row({"model": name}, compared, name, 0.5, sizes, plan, part="latency")


if __name__ == "__main__":
    main()
