"""Errors of methods on a trained ResNet at equal widths, and the speed of convolutional networks with half the MACs.

    python -m benchmarks.quality.convnets --output benchmarks/results/convnets.json

Errors are of the digits' ResNet on held-out images, at the uniform widths whose MACs are nearest to the share. Speed is
that of networks with random weights in ONNX Runtime on the CPU, dense and reduced interleaved in one process.
"""

import tempfile
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.subjects import Subject, of_images
from benchmarks.quality.ways import Way
from benchmarks.speed.random_models import random_checkpoint, time_pair
from corp_deploy.families.counting import macs
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import method_from_preset
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.widths import Widths
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.dense_model import model_of_directory
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


WAYS = (
    Way("none", "none"),
    Way("grail", "grail"),
    Way("grail, symmetric closed loop", "grail", loop="symmetric"),
    Way("best"),
    Way("best, closed loop", loop=Loop()),
)


def evenly(model: nn.Module, sparsity: float, align: int) -> Widths:
    """Return widths with the same share of every site's channels removed."""
    return uniform_widths(model, method_from_preset("none", conv_sparsity=sparsity, align_conv=align))


def nearest(model: nn.Module, asked: float, align: int) -> tuple[Widths, float]:
    """Return the uniform widths that remove about this share of the MACs, and the share that they remove."""
    dense = macs(model)

    def removed(percent: int) -> float:
        return 1.0 - macs(at_widths(model, evenly(model, percent / 100, align))) / dense

    enough = bisect_left(range(99), asked, key=removed)
    percent = min((max(enough - 1, 0), enough), key=lambda each: abs(removed(each) - asked))
    return evenly(model, percent / 100, align), removed(percent)


def row_of(subject: Subject, way: Way, widths: Widths) -> dict[str, float]:
    """Reduce and judge on the held-out images."""
    return subject.figures(way.reduced(subject, method_from_preset(way.preset, align_conv=ALIGN), widths))


def add_methods(bench: Bench, dense: Checkpoint) -> None:
    """Make the rows of every way at every share and seed."""
    train, held_out = load_part("train"), load_part("held-out")
    both, labels = (train.images, held_out.images), held_out.labels
    with tempfile.TemporaryDirectory() as scratch:
        for seed in SEEDS:
            drawn = {"samples": CALIBRATION_IMAGES, "seed": seed}
            subject = of_images("ResNet", dense, Path(scratch), *both, **drawn, labels=labels)
            for share in REMOVED:
                widths, removed = nearest(dense.model, share, ALIGN)
                for way in WAYS:
                    key = {"asked": share, "way": way.name, "seed": seed, "removed_of_model": removed}
                    bench.row(key, row_of, subject, way, widths)


def compared(name: str, asked: float, batches: tuple[int, ...], plan: Plan) -> dict[str, Any]:
    """Time one network dense against reduced, with a line for each batch size."""
    dense = random_checkpoint(SHAPES[name])
    narrower = replace(dense, model=at_widths(dense.model, nearest(dense.model, asked, 8)[0]))
    bench = time_pair(dense, narrower, batches, plan)
    share = macs(narrower.model) / macs(dense.model)
    return {"macs_share": share, **speed_record(bench), "environment": bench.environment}


@measures("benchmarks/convnets")
@click.option("--batches", default="1,8,32", show_default=True)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds per batch size.")
@click.option("--rounds", type=int, default=6, show_default=True, help="Least rounds per batch size.")
def main(bench: Bench, batches: str, time_limit: float, rounds: int) -> None:
    """Measure both parts."""
    bench.share(calibration_images=CALIBRATION_IMAGES, align=ALIGN)
    add_methods(bench, model_of_directory(DIGITS))
    plan = Plan(time_limit_s=time_limit, min_rounds=rounds, noise_rounds=rounds)
    sizes = tuple(int(size) for size in batches.split(","))
    for name in SHAPES:
        bench.row({"model": name}, compared, name, 0.5, sizes, plan, part="latency")


if __name__ == "__main__":
    main()
