"""Every preset at equal kept widths, on models this project trained.

    python -m benchmarks.quality.methods --output benchmarks/results/methods.json

Two models: the digits example, and the ViT of benchmarks/quality/training.py on procedural images, trained first where
its weights are not in the cache. Widths are given exactly (hidden to a multiple of 8, heads to one of 4), the same for
every method; all numbers are on held-out images.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.harness import Bench, measures
from benchmarks.quality.procedural_images import made
from benchmarks.quality.subjects import DIGITS
from benchmarks.quality.timm_sites import first_widths
from benchmarks.quality.training import PLAIN, trained
from calib.images import Images
from calib.moments import Moments
from corp_deploy.reduction.calibrate import Statistics, calibrate
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import LoopName, Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.input_sets import images_for_model
from examples.digits.images import load_part

Kind = Literal["mlp", "attention", "joint"]
KINDS: tuple[Kind, ...] = ("mlp", "attention", "joint")
SPARSITIES, SEEDS, CALIBRATION_IMAGES, HELD_OUT = (0.3, 0.5, 0.7, 0.75, 0.875), (0, 1, 2), 512, 500
ALIGN_HIDDEN, ALIGN_HEAD = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of the table: a preset, in the open or in a closed loop, and the kinds of reduction it can do."""

    name: str
    preset: str
    loop: LoopName | None = None
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
    Way(name="best, closed loop", preset="best", loop="asymmetric"),
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


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits [N,classes] of all images in float64."""
    with torch.inference_mode():
        return torch.cat([model(piece) for piece in images.split(50)]).double()


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A dense model, images of one seed to calibrate on, and held-out ones with labels."""

    dense: Checkpoint
    calibration: Images
    images: Tensor
    labels: NDArray[np.int64]

    @cached_property
    def moments(self) -> Moments:
        return calibrate(self.dense, self.calibration, batch_size=32, statistics=Statistics(attention_system=True))

    @cached_property
    def answers(self) -> Tensor:
        return logits(self.dense.model, self.images)

    def facts(self, name: str) -> dict[str, Any]:
        """Return the dense model's own row."""
        return {
            "name": name,
            "accuracy": float((self.answers.argmax(dim=1).numpy() == self.labels).mean()),
            "held_out_images": len(self.labels),
            "classes": int(self.labels.max()) + 1,
            "architecture": dict(self.dense.architecture.kwargs),
        }

    def reduced(self, way: Way, method: Method) -> nn.Module:
        """Return the reduced model."""
        if way.loop is None:
            return reduce(self.dense.model, self.moments, method, images=self.calibration).model
        loop = Loop() if way.loop == "asymmetric" else None
        return reduce_traced(self.dense.model, self.calibration, method, loop=loop).model

    def row(self, way: Way, kind: Kind, sparsity: float) -> dict[str, Any]:
        """Reduce and judge."""
        model = self.reduced(way, way.method(kind, sparsity))
        answers = logits(model, self.images)
        top = answers.argmax(dim=1)
        return {
            **first_widths(model),
            "accuracy": float((top.numpy() == self.labels).mean()),
            "agreement": float((top == self.answers.argmax(dim=1)).double().mean()),
            "relative_error": float((answers - self.answers).norm() / self.answers.norm()),
        }


def digits(cache: Path, scratch: Path, images: int, seed: int) -> Subject:
    """Return the example in the repository."""
    return _subject(load_checkpoint(DIGITS), load_part("train"), load_part("held-out"), scratch, images, seed)


def procedural(cache: Path, scratch: Path, images: int, seed: int) -> Subject:
    """Return the larger model, trained where the cache has no weights."""
    dense = trained(cache / "procedural", PLAIN)
    return _subject(dense, made("train", 2048), made("held-out", HELD_OUT), scratch, images, seed)


def _subject(dense: Checkpoint, train: Any, held_out: Any, scratch: Path, images: int, seed: int) -> Subject:
    np.save(scratch / "calibration.npy", train.images)
    return Subject(
        dense=dense,
        calibration=images_for_model(dense.model, scratch / "calibration.npy", samples=images, seed=seed),
        images=torch.from_numpy(held_out.images[:HELD_OUT]),
        labels=held_out.labels[:HELD_OUT],
    )


SUBJECTS: Mapping[str, Callable[[Path, Path, int, int], Subject]] = {"digits": digits, "procedural": procedural}


def cases(sparsities: tuple[float, ...]) -> Iterator[tuple[Kind, float, Way]]:
    """Every row of one model and seed."""
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
            bench.record.put("models", subject.facts(name), ("name",))
            for kind, sparsity, way in cases(sparsities):
                key = {"model": name, "seed": seed, "kind": kind, "sparsity": sparsity, "method": way.name}
                bench.row(key, subject.row, way, kind, sparsity)


if __name__ == "__main__":
    main()
