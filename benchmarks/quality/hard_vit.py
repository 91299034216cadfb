"""A ViT in which no channel is to spare, reduced by every method without labels: what is left of its accuracy.

    python -m benchmarks.quality.hard_vit --output benchmarks/results/hard_vit.json

The model `HARD` of benchmarks/quality/training.py, trained first where its weights are not in the cache. Methods see
calibration images alone, labels of held-out ones judge. Uniform rows remove the same share of every MLP's hidden
channels and of every head's queries and keys; rows by site keep the MACs of those.
"""

import tempfile
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.methods import Subject, logits
from benchmarks.quality.procedural_images import Labelled, made
from benchmarks.quality.training import HARD, SEED, labels_by_band, trained
from corp_deploy.families.counting import macs
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.planning.plan import make_plan
from corp_deploy.planning.request import build_request
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import polished
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import PRESETS, Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import images_for_model, model_digest
from perf.parity.labels import accuracy_on_labels, mcnemar

SPARSITIES = (0.3, 0.5)
CALIBRATION_IMAGES, HELD_OUT_IMAGES, ALIGN = 512, 2000, 2


@dataclass(frozen=True, slots=True)
class Way:
    """A line of the table; `by_site` spends the MACs of uniform widths by what each site costs."""

    name: str
    preset: str = "best"
    by_site: bool = False
    closed_loop: bool = False
    polished: bool = False

    def method(self, sparsity: float) -> Method:
        """Presets that keep queries and keys reduce MLPs alone."""
        widths: dict[str, Any] = {"mlp_sparsity": sparsity, "align_hidden": ALIGN, "align_head": ALIGN}
        if PRESETS[self.preset].qk_recovery != "keep":
            widths["attention_sparsity"] = sparsity
        return method_from_preset(self.preset, **widths)


WAYS = (
    Way("none", "none"),
    Way("vbp, MLPs alone", "vbp"),
    Way("grail, MLPs alone", "grail"),
    Way("corp-v1", "corp-v1"),
    Way("corp", "corp"),
    Way("best"),
    Way("best, closed loop", closed_loop=True),
    Way("best, by site", by_site=True),
    Way("best, by site, closed loop", by_site=True, closed_loop=True),
    Way("best, by site, closed loop, layers polished", by_site=True, closed_loop=True, polished=True),
)


def subject_of(dense: Checkpoint, calibration: Labelled, held_out: Labelled, scratch: Path) -> Subject:
    """Return the dense model with images to calibrate on, without labels, and labelled ones to judge by."""
    np.save(scratch / "calibration.npy", calibration.images)
    return Subject(
        dense=dense,
        calibration=images_for_model(dense.model, scratch / "calibration.npy"),
        images=torch.from_numpy(held_out.images),
        labels=labels_by_band(held_out),
    )


def reduced(subject: Subject, way: Way, sparsity: float) -> nn.Module:
    """Return the reduced model."""
    model, method, widths = subject.dense.model, way.method(sparsity), None
    if way.by_site:
        uniform = reduce(model, subject.moments, Way("uniform", "none").method(sparsity)).model
        options = ReduceOptions(preset=way.preset, macs=macs(uniform) / macs(model))
        asked = replace(build_request(options), method=method)
        widths = make_plan(subject.dense, subject.moments, asked, subject.calibration).widths
    if way.closed_loop:
        result = reduce_traced(model, subject.calibration, method, widths=widths, loop=Loop()).model
    else:
        result = reduce(model, subject.moments, method, widths=widths, images=subject.calibration).model
    return polished(model, result, subject.calibration, PolishOptions()).model if way.polished else result


def row_of(subject: Subject, way: Way, sparsity: float) -> dict[str, Any]:
    """Judge one reduced model on the held-out images."""
    model = reduced(subject, way, sparsity)
    share = macs(model) / macs(subject.dense.model)
    answers = logits(model, subject.images).numpy()
    return {"macs_share": share} | figures(subject.answers.numpy(), answers, subject.labels)


def figures(
    dense_NC: NDArray[np.float64], reduced_NC: NDArray[np.float64], labels_N: NDArray[np.int64]
) -> dict[str, Any]:
    """Relative error of the logits, agreement, accuracy, and its change in points with a paired 95 % interval.

    The interval is that of a difference of paired shares: of n images the dense model alone has b right and the
    reduced one alone c, so the change's variance is (b + c - (b - c)^2 / n) / n^2.
    """
    pairs, images = mcnemar("dense", dense_NC, "reduced", reduced_NC, labels_N), len(labels_N)
    change = (pairs.only_b - pairs.only_a) / images
    apart = NormalDist().inv_cdf(0.975) * sqrt((pairs.only_a + pairs.only_b) / images - change**2) / sqrt(images)
    return {
        "relative_error": float(np.linalg.norm(reduced_NC - dense_NC) / np.linalg.norm(dense_NC)),
        "agreement": float((reduced_NC.argmax(1) == dense_NC.argmax(1)).mean()),
        "accuracy": accuracy_on_labels("reduced", reduced_NC, labels_N).accuracy,
        "points": [100.0 * each for each in (change, change - apart, change + apart)],
        "only_dense_right": pairs.only_a,
        "only_reduced_right": pairs.only_b,
        "mcnemar_p": pairs.p_value,
    }


def facts(subject: Subject) -> dict[str, Any]:
    """Return what all rows share: the model, its training and the images."""
    dense = accuracy_on_labels("dense", subject.answers.numpy(), subject.labels)
    return {
        "model": dict(subject.dense.architecture.kwargs),
        "training": {"images": HARD.images, "epochs": HARD.epochs, "seed": SEED},
        "weights": model_digest(subject.dense.model),
        "classes": HARD.classes,
        "calibration_images": subject.calibration.count,
        "held_out_images": dense.images,
        "dense_macs": macs(subject.dense.model),
        "dense_accuracy": dense.accuracy,
        "dense_accuracy_interval": [dense.low, dense.high],
    }


def measure(bench: Bench, subject: Subject) -> None:
    """Make every row, in the table's order."""
    bench.share(**facts(subject))
    for sparsity in SPARSITIES:
        for way in WAYS:
            bench.row({"method": way.name, "sparsity": sparsity}, row_of, subject, way, sparsity)


@measures("benchmarks/hard-vit")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), default=Path("build/methods/hard"))
def main(bench: Bench, cache: Path) -> None:
    """Measure and write the record."""
    torch.set_num_threads(1)
    calibration, held_out = made("train", CALIBRATION_IMAGES), made("held-out", HELD_OUT_IMAGES)
    with tempfile.TemporaryDirectory() as scratch:
        measure(bench, subject_of(trained(cache, HARD), calibration, held_out, Path(scratch)))


if __name__ == "__main__":
    main()
