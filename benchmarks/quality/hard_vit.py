"""A ViT without redundant channels, reduced by every method without labels.

    python -m benchmarks.quality.hard_vit --output benchmarks/results/hard_vit.json

The model is `HARD` of benchmarks/quality/training.py, trained first if the cache lacks its weights. Methods get only
calibration images, and labels of held-out images judge. Uniform rows remove the same share of every MLP's hidden
channels and of every head's queries and keys; rows by site keep the MACs of these.
"""

import tempfile
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Bench, measures
from benchmarks.quality.procedural_images import Labelled, made
from benchmarks.quality.subjects import Subject, of_images, outputs
from benchmarks.quality.training import HARD, SEED, labels_by_band, trained
from benchmarks.quality.ways import Way, uniform_share, widths_by_site
from corp_deploy.families.counting import macs
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import PRESETS, Method, method_from_preset
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import model_digest
from perf.parity.labels import accuracy_on_labels, mcnemar

SPARSITIES = (0.3, 0.5)
CALIBRATION_IMAGES, HELD_OUT_IMAGES, ALIGN = 512, 2000, 2


WAYS = (
    Way("none", "none"),
    Way("vbp, MLPs alone", "vbp"),
    Way("grail, MLPs alone", "grail"),
    Way("corp-v1", "corp-v1"),
    Way("corp", "corp"),
    Way("best"),
    Way("best, closed loop", loop=Loop()),
    Way("best, by site", by_site=True),
    Way("best, by site, closed loop", by_site=True, loop=Loop()),
    Way("best, by site, closed loop, layers polished", by_site=True, loop=Loop(), polished=True),
)


def method_of(preset: str, sparsity: float) -> Method:
    """Return the method; presets that keep queries and keys reduce only MLPs."""
    attention = None if PRESETS[preset].qk_recovery == "keep" else sparsity
    align = {"align_hidden": ALIGN, "align_head": ALIGN}
    return method_from_preset(preset, mlp_sparsity=sparsity, attention_sparsity=attention, **align)


def subject_of(dense: Checkpoint, calibration: Labelled, held_out: Labelled, scratch: Path) -> Subject:
    """Return the dense model with images to calibrate on, without labels, and labelled images to judge by."""
    both, labels = (calibration.images, held_out.images), labels_by_band(held_out)
    return of_images("hard", dense, scratch, *both, labels=labels, attention_system=True)


def row_of(subject: Subject, way: Way, sparsity: float) -> dict[str, Any]:
    """Judge one reduced model on the held-out images."""
    method, widths = method_of(way.preset, sparsity), None
    if way.by_site:
        share = uniform_share(subject.dense.model, method_of("none", sparsity))
        widths = widths_by_site(subject, method, share)
    model = way.reduced(subject, method, widths)
    answers = outputs(model, subject.held_out).numpy()
    assert subject.labels is not None
    own = {"macs_share": macs(model) / macs(subject.dense.model)}
    return own | figures(subject.answers.numpy(), answers, subject.labels)


def figures(
    dense_NC: NDArray[np.float64], reduced_NC: NDArray[np.float64], labels_N: NDArray[np.int64]
) -> dict[str, Any]:
    """Relative error of the logits, agreement, accuracy, and its change in points with a paired 95 % interval.

    The interval is that of a difference of paired shares: if only the dense model is right on b of n images, and only
    the reduced one on c, the variance of the change is (b + c - (b - c)^2 / n) / n^2.
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
    """Return the facts of all rows: the model, its training and the images."""
    assert subject.labels is not None
    dense = accuracy_on_labels("dense", subject.answers.numpy(), subject.labels)
    return {
        "model": dict(subject.dense.architecture.kwargs),
        "training": {"images": HARD.images, "epochs": HARD.epochs, "seed": SEED},
        "weights": model_digest(subject.dense.model),
        "classes": HARD.classes,
        "calibration_images": subject.inputs.count,
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
