"""Every preset at equal kept widths, and each component of `best` toggled alone, on models this project trained.

    python -m benchmarks.quality.methods --output benchmarks/results

Two models: the digits example, and the ViT of benchmarks/quality/procedural_vit.py, which is trained first where its
weights are not in the cache. Widths are given exactly (hidden to a multiple of 8, heads to one of 4), the same for
every method; all numbers are on held-out images. A run that was stopped goes on from its last row; a row is made again
when its choices or the code that makes it have changed.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.pages.methods_page import page
from benchmarks.quality import procedural_vit
from benchmarks.quality.methods_variants import KINDS, VARIANTS, Kind, Variant
from benchmarks.quality.procedural_images import made
from benchmarks.quality.timm_sites import first_widths
from calib.collect import Options, collect
from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.family import listened, sites_of
from corp_deploy.planning.curves import eliminations
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint, load_checkpoint
from corp_deploy.store.inputs import images_for_model, lineage_for_moments
from corp_deploy.traced.models.sites import calibration_taps
from examples.digits.images import load

SPARSITIES = (0.3, 0.5, 0.7, 0.75, 0.875)
SEEDS = (0, 1, 2)
CALIBRATION_IMAGES = 512
ALIGN_HIDDEN, ALIGN_HEAD = 8, 4
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model with images to calibrate on and held-out ones to judge by."""

    name: str
    checkpoint: Checkpoint
    calibration: NDArray[np.float32]
    images: Tensor
    labels: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method at one sparsity, calibrated on one choice of images; judged on the held-out ones."""

    model: str
    seed: int
    kind: str
    sparsity: float
    method: str
    component: bool
    hidden: int
    qk: int
    v: int
    accuracy: float
    agreement: float
    relative_error: float
    digest: str


def digits(cache: Path, count: int) -> Subject:
    """The example in the repository."""
    held_out = load("held-out")
    return Subject(
        name="digits",
        checkpoint=load_checkpoint(DIGITS),
        calibration=load("train").images,
        images=torch.from_numpy(held_out.images[:count]),
        labels=held_out.labels[:count],
    )


def procedural(cache: Path, count: int) -> Subject:
    """The larger model, trained where the cache has no weights."""
    directory = cache / "procedural"
    checkpoint = (
        load_checkpoint(directory) if (directory / "config.json").is_file() else procedural_vit.trained(directory)
    )
    held_out = made("held-out", count)
    return Subject(
        name="procedural",
        checkpoint=checkpoint,
        calibration=made("train", 2048).images,
        images=torch.from_numpy(held_out.images),
        labels=held_out.labels,
    )


def method_of(variant: Variant, kind: Kind, sparsity: float) -> Method:
    """Which removes the same share of every site of this kind."""
    return replace(
        variant.choices(),
        mlp_sparsity=None if kind == "attention" else sparsity,
        attention_sparsity=None if kind == "mlp" else sparsity,
        align_hidden=ALIGN_HIDDEN,
        align_head=ALIGN_HEAD,
    )


def logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(piece) for piece in images.split(50)]).double()


class Bench:
    """One model calibrated on one choice of images: what every method starts from, made once."""

    def __init__(self, subject: Subject, seed: int, calibration_images: int, cache: Path) -> None:
        self.subject, self.seed = subject, seed
        path = cache / f"{subject.name}-calibration.npy"
        if not path.is_file():
            np.save(path, subject.calibration)
        self.images: Images = images_for_model(subject.checkpoint.model, path, samples=calibration_images, seed=seed)
        model = subject.checkpoint.model
        self.moments: Moments = collect(
            listened(model),
            calibration_taps(model, sites_of(model)),
            self.images.batches(32),
            device="cpu",
            options=Options(attention_system=True),
            lineage=lineage_for_moments(subject.checkpoint, self.images),
        )
        self.dense = logits(model, subject.images)
        self.eliminations = eliminations(model, self.moments, method_from_preset("best"))

    def _reduced(self, variant: Variant, method: Method) -> nn.Module:
        model = self.subject.checkpoint.model
        if variant.loop == "symmetric":
            return reduce_traced(model, self.images, method).model
        if variant.loop is not None:
            return reduce_traced(model, self.images, method, loop=variant.loop).model
        return reduce(model, self.moments, method, eliminations=self.eliminations, images=self.images).model

    def row(self, method: Variant, kind: Kind, sparsity: float) -> Row:
        """Reduce and judge."""
        reduced = self._reduced(method, method_of(method, kind, sparsity))
        answers = logits(reduced, self.subject.images)
        top = answers.argmax(dim=1)
        return Row(
            model=self.subject.name,
            seed=self.seed,
            kind=kind,
            sparsity=sparsity,
            method=method.name,
            component=method.component,
            **first_widths(reduced),
            accuracy=float((top.numpy() == self.subject.labels).mean()),
            agreement=float((top == self.dense.argmax(dim=1)).double().mean()),
            relative_error=float((answers - self.dense).norm() / self.dense.norm()),
            digest=method.digest(),
        )


def plan(sparsities: Sequence[float]) -> Iterator[tuple[Variant, Kind, float]]:
    """Every row of one model and seed."""
    for kind in KINDS:
        for sparsity in sparsities:
            for method in VARIANTS:
                if kind in method.kinds:
                    yield method, kind, sparsity


def measured(
    subject: Subject, seed: int, sparsities: Sequence[float], images: int, cache: Path
) -> list[dict[str, Any]]:
    """All rows of one model and seed; those in the cache that the same code made are not made again."""
    path = cache / f"rows-{subject.name}-{seed}-{images}.json"
    made: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
    digests = {method.name: method.digest() for method in VARIANTS}
    rows = [row for row in made if row.get("digest") == digests.get(row["method"], "")]
    there = {(row["method"], row["kind"], row["sparsity"]) for row in rows}
    missing = [each for each in plan(sparsities) if (each[0].name, each[1], each[2]) not in there]
    bench = Bench(subject, seed, images, cache) if missing else None
    for method, kind, sparsity in missing:
        assert bench is not None, missing
        rows.append(asdict(bench.row(method, kind, sparsity)))
        path.write_text(json.dumps(rows))
    return rows


def record(subjects: Sequence[Subject], rows: list[dict[str, Any]], images: int) -> dict[str, Any]:
    """The benchmark's record: the dense models and every row."""
    dense = [
        {
            "name": subject.name,
            "accuracy": float(
                (logits(subject.checkpoint.model, subject.images).argmax(dim=1).numpy() == subject.labels).mean()
            ),
            "held_out_images": len(subject.labels),
            "classes": int(subject.labels.max()) + 1,
            "architecture": dict(subject.checkpoint.architecture.kwargs),
        }
        for subject in subjects
    ]
    return {
        "version": 1,
        "kind": "methods-benchmark",
        "environment": {"torch": torch.__version__, "python": platform.python_version()},
        "calibration_images": images,
        "models": dense,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for methods.json and methods.md")
    parser.add_argument("--cache", type=Path, default=Path("build/methods"), help="trained weights and finished rows")
    parser.add_argument("--models", default="digits,procedural")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="digits, one seed, few images, 50 %% alone: a smoke run")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    given.cache.mkdir(parents=True, exist_ok=True)
    names = ["digits"] if given.quick else given.models.split(",")
    seeds = [0] if given.quick else [int(seed) for seed in given.seeds.split(",")]
    sparsities, images = ((0.5,), 24) if given.quick else (SPARSITIES, CALIBRATION_IMAGES)
    held_out = 100 if given.quick else 500
    subjects = [(digits if name == "digits" else procedural)(given.cache, held_out) for name in names]
    rows = [
        row
        for subject in subjects
        for seed in seeds
        for row in measured(subject, seed, sparsities, images, given.cache)
    ]
    found = record(subjects, rows, images)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "methods.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.output / "methods.md").write_text(page(found))


if __name__ == "__main__":
    main()
