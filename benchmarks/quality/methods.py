"""Every preset at equal kept widths, on two models that this project trained.

    python -m benchmarks.quality.methods --output benchmarks/results/methods.json

The models are the digits example, and the ViT of benchmarks/quality/training.py on procedural images, which is trained
first if the cache lacks its weights. Widths are equal for every method: hidden channels are a multiple of 8, head
dimensions of 4. All figures are of held-out images.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import click
import torch

from benchmarks.harness import Bench, measures
from benchmarks.quality import ways
from benchmarks.quality.procedural_images import made
from benchmarks.quality.subjects import DIGITS, Subject, of_images
from benchmarks.quality.timm_sites import first_widths
from benchmarks.quality.training import PLAIN, trained
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from examples.digits.images import load_part

Kind = Literal["mlp", "attention", "joint"]
KINDS: tuple[Kind, ...] = ("mlp", "attention", "joint")
SPARSITIES, SEEDS, CALIBRATION_IMAGES, HELD_OUT = (0.3, 0.5, 0.7, 0.75, 0.875), (0, 1, 2), 512, 500
ALIGN_HIDDEN, ALIGN_HEAD = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way(ways.Way):
    """A way to reduce, and the kinds of reduction that it has."""

    kinds: tuple[Kind, ...] = KINDS

    def method(self, kind: Kind, sparsity: float) -> Method:
        """Return the method that removes the same share of every site of this kind."""
        return method_from_preset(
            self.preset,
            mlp_sparsity=None if kind == "attention" else sparsity,
            attention_sparsity=None if kind == "mlp" else sparsity,
            align_hidden=ALIGN_HIDDEN,
            align_head=ALIGN_HEAD,
        )


WAYS = (
    Way(name="best, closed loop", preset="best", loop=Loop()),
    Way(name="best", preset="best"),
    Way(name="corp", preset="corp"),
    Way(name="corp-v1", preset="corp-v1"),
    Way(name="grail", preset="grail", kinds=("mlp",)),
    Way(name="grail, symmetric closed loop", preset="grail", loop="symmetric", kinds=("mlp",)),
    Way(name="grail-fold", preset="grail-fold", kinds=("mlp",)),
    Way(name="fold", preset="fold", kinds=("mlp",)),
    Way(name="vbp", preset="vbp", kinds=("mlp",)),
    Way(name="none", preset="none"),
)


def facts(name: str, subject: Subject) -> dict[str, Any]:
    """Return the row of the dense model."""
    assert subject.labels is not None, name
    return {
        "name": name,
        "accuracy": subject.figures(subject.dense.model)["accuracy"],
        "held_out_images": len(subject.labels),
        "classes": int(subject.labels.max()) + 1,
        "architecture": dict(subject.dense.architecture.kwargs),
    }


def row_of(subject: Subject, way: Way, kind: Kind, sparsity: float) -> dict[str, Any]:
    """Reduce and judge."""
    model = way.reduced(subject, way.method(kind, sparsity))
    return {**first_widths(model), **subject.figures(model)}


def digits(cache: Path, scratch: Path, images: int, seed: int) -> Subject:
    """Return the digits example."""
    return _subject(load_checkpoint(DIGITS), load_part("train"), load_part("held-out"), scratch, images, seed)


def procedural(cache: Path, scratch: Path, images: int, seed: int) -> Subject:
    """Return the model of procedural images, trained first if the cache lacks its weights."""
    dense = trained(cache / "procedural", PLAIN)
    return _subject(dense, made("train", 2048), made("held-out", HELD_OUT), scratch, images, seed)


def _subject(dense: Checkpoint, train: Any, held_out: Any, scratch: Path, images: int, seed: int) -> Subject:
    both = train.images, held_out.images[:HELD_OUT]
    labels = held_out.labels[:HELD_OUT]
    more: dict[str, Any] = {"labels": labels, "attention_system": True}
    return of_images("", dense, scratch, *both, samples=images, seed=seed, **more)


SUBJECTS: Mapping[str, Callable[[Path, Path, int, int], Subject]] = {"digits": digits, "procedural": procedural}


def cases(sparsities: tuple[float, ...]) -> Iterator[tuple[Kind, float, Way]]:
    """Yield every row of one model and seed."""
    for kind, sparsity, way in product(KINDS, sparsities, WAYS):
        if kind in way.kinds:
            yield kind, sparsity, way


@measures("methods-benchmark")
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/methods"), help="Trained weights.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--quick", is_flag=True, help="Digits, one seed, few images, 50 % alone: a smoke run.")
def main(bench: Bench, cache: Path, threads: int, quick: bool) -> None:
    """Measure and write the record."""
    torch.set_num_threads(threads)
    sparsities, seeds, images = ((0.5,), (0,), 24) if quick else (SPARSITIES, SEEDS, CALIBRATION_IMAGES)
    bench.share(calibration_images=images)
    for name, seed in product(("digits",) if quick else SUBJECTS, seeds):
        with tempfile.TemporaryDirectory() as scratch:
            subject = SUBJECTS[name](cache, Path(scratch), images, seed)
            bench.record.put("models", facts(name, subject), ("name",))
            for kind, sparsity, way in cases(sparsities):
                key = {"model": name, "seed": seed, "kind": kind, "sparsity": sparsity, "method": way.name}
                bench.row(key, row_of, subject, way, kind, sparsity)


if __name__ == "__main__":
    main()
