"""The parity chain: dense torch -> reduced torch -> ONNX FP32 -> ONNX FP16, on real images, link by link."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from calib.images import Images
from export.precision import typed_copy
from perf import accuracy as labelled
from perf import structure, tolerance
from perf.measures import Measures, measures
from perf.module_runner import ModuleRunner
from perf.onnx_runner import OnnxRunner
from perf.parity import ImageSet, Link, Parity, figures, link
from perf.runners import Runner
from perf.tolerance import Tolerance

from . import vit
from .checkpoint import Checkpoint, load_checkpoint
from .errors import BadInput
from .graphs import facts_of_onnx

Logits = NDArray[np.float32]
Run = Callable[[NDArray[np.float32]], Logits]
DENSE = "dense torch fp32"
HALF_PRECISIONS = ("fp16", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows the reduced model to differ from the dense one by; None sets no limit."""

    min_agreement: float | None = None
    max_error: float | None = None
    half_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One more step of the chain: a label, its kind of link, and how to run it."""

    label: str
    name: str
    half: bool
    torch: bool
    open: Callable[[], Runner]
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The parity record, and per-image figures for the file beside it."""

    parity: Parity
    figures: dict[str, NDArray[np.generic]]


def candidate_from_path(path: Path) -> Candidate:
    """A model directory or an ONNX file as a step of the chain. Raises BadInput for anything else."""
    if path.is_dir():
        checkpoint = load_checkpoint(path)
        return Candidate(
            label=f"{path.name} torch fp32",
            name=path.name,
            half=False,
            torch=True,
            open=lambda: ModuleRunner(checkpoint.model),
        )
    if path.suffix != ".onnx":
        raise BadInput(f"{path}: expected a model directory written by corp-deploy or an .onnx file")
    facts = facts_of_onnx(path)
    return Candidate(
        label=f"{path.parent.name}/{path.name} ONNX {facts.precision}",
        name=f"{path.parent.name}-onnx-{facts.precision}",
        half=facts.precision in HALF_PRECISIONS,
        torch=False,
        open=lambda: OnnxRunner(path),
        batch=facts.batch,
    )


def _logits(run: Run, images: NDArray[np.float32], batch: int) -> Logits:
    """Logits of all images at one batch size; the last batch is filled up by repeating images, so every run has that
    size.
    """
    rows = []
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        filled = part if len(part) == batch else np.resize(part, (batch, *part.shape[1:]))
        rows.append(run(filled)[: len(part)])
    return np.concatenate(rows)


@contextmanager
def _opened(candidate: Candidate, images: NDArray[np.float32]) -> Iterator[Run]:
    """The candidate as a function of any number of images; a static graph is fed in its own batch size."""
    with candidate.open() as runner:
        yield runner if candidate.batch is None else lambda given: _logits(runner, given, candidate.batch or 1)


def _half_noise(dense: Checkpoint, images: NDArray[np.float32], reference: Logits, batch: int) -> Measures:
    """The dense model's own FP16-against-FP32 error on these images, with the same safe LayerNorm and softmax."""
    half = typed_copy(vit.exportable(dense.model), "fp16")

    def run(given: NDArray[np.float32]) -> Logits:
        with torch.inference_mode():
            logits: Logits = half(torch.from_numpy(given)).numpy()
        return logits

    return measures(reference, _logits(run, images, batch))


def _structure(
    candidate: Candidate, run: Run, images: NDArray[np.float32], by_batch: dict[int, Logits], bound: float
) -> list[structure.Finding]:
    slots = candidate.batch or max(by_batch)
    found = [
        structure.batch_slot(candidate.label, run, images[:1], batch=slots, bound=bound),
        structure.permutation(candidate.label, run, images[: max(slots, 2)], bound=bound),
        *structure.outputs(candidate.label, by_batch[max(by_batch)]),
    ]
    return found + structure.batch_sizes(candidate.label, by_batch, bound=bound)


def _all_images(images: Images, batch_size: int) -> NDArray[np.float32]:
    return np.concatenate([batch.numpy() for batch in images.batches(batch_size)])


def prove(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    images: Images,
    *,
    batches: Sequence[int],
    limits: Limits,
    labels: NDArray[np.int64] | None = None,
    done: Callable[[int], None] | None = None,
) -> Proof:
    """Compare every candidate with its predecessor and the last one with the dense model.

    A torch candidate is held against the dense model and the user's limits; an ONNX FP32 graph against the torch model
    it came from and a float32 bound; an FP16 graph against the FP32 step before it and a multiple of the dense model's
    own FP16 error. `done` is told how many candidates are finished. Raises BadInput for images or labels that don't
    fit.
    """
    pixels = _all_images(images, max(batches))
    depth = len(vit.parts(dense.model).mlps) or 1
    with ModuleRunner(dense.model) as runner:
        dense_logits = _logits(runner, pixels, max(batches))
    noise = _half_noise(dense, pixels, dense_logits, max(batches))
    links: list[Link] = []
    findings: list[structure.Finding] = []
    outputs: dict[str, Logits] = {DENSE: dense_logits}
    previous, single = (DENSE, dense_logits), DENSE
    for candidate in candidates:
        with _opened(candidate, pixels) as run:
            sizes = [candidate.batch] if candidate.batch else sorted(set(batches))
            by_batch = {size: _logits(run, pixels, size) for size in sizes}
            bounds = _tolerance(candidate, previous[1], noise, limits, depth)
            findings += _structure(
                candidate, run, pixels, by_batch, _slot_bound(candidate, noise, limits, depth, dense_logits)
            )
        reference = (DENSE, dense_logits) if candidate.torch else previous
        links.append(
            link(
                name=candidate.name,
                kind="reduced" if candidate.torch else "half" if candidate.half else "exact",
                reference=reference[0],
                candidate=candidate.label,
                reference_NC=reference[1],
                candidate_by_batch=by_batch,
                tolerance=bounds,
            )
        )
        outputs[candidate.label] = by_batch[max(by_batch)]
        if not candidate.half:
            previous, single = (candidate.label, by_batch[max(by_batch)]), candidate.label
        last = by_batch
        if done is not None:
            done(len(links))
    assert single in outputs, single
    if len(candidates) > 1:
        links.append(_whole(candidates[-1], dense_logits, last, limits, noise))
    return Proof(
        parity=Parity(
            images=ImageSet(count=images.count, digest=images.digest),
            links=tuple(links),
            structure=tuple(findings),
            accuracy=tuple(labelled.accuracy(name, rows, labels) for name, rows in outputs.items())
            if labels is not None
            else (),
            comparisons=_comparisons(outputs, labels),
        ),
        figures=figures(dense_logits, {name: rows for name, rows in outputs.items() if name != DENSE}),
    )


def _tolerance(candidate: Candidate, reference: Logits, noise: Measures, limits: Limits, depth: int) -> Tolerance:
    if candidate.torch:
        return tolerance.limits(min_agreement=limits.min_agreement, max_error=limits.max_error, noise=noise)
    if candidate.half:
        return tolerance.half(noise, factor=limits.half_factor)
    return tolerance.exact(depth=depth, largest_logit=float(np.abs(reference).max()))


def _slot_bound(candidate: Candidate, noise: Measures, limits: Limits, depth: int, reference: Logits) -> float:
    """How far one image's answers may lie apart inside one candidate: rounding in its own precision."""
    if candidate.half:
        bound = tolerance.half(noise, factor=limits.half_factor).max_relative_error
    else:
        bound = tolerance.exact(depth=depth, largest_logit=float(np.abs(reference).max())).max_relative_error
    assert bound is not None, candidate.label
    return bound


def _whole(last: Candidate, dense_logits: Logits, by_batch: dict[int, Logits], limits: Limits, noise: Measures) -> Link:
    return link(
        name="whole",
        kind="whole",
        reference=DENSE,
        candidate=last.label,
        reference_NC=dense_logits,
        candidate_by_batch=by_batch,
        tolerance=tolerance.limits(min_agreement=limits.min_agreement, max_error=limits.max_error, noise=noise),
    )


def _comparisons(outputs: dict[str, Logits], labels: NDArray[np.int64] | None) -> tuple[labelled.Comparison, ...]:
    if labels is None:
        return ()
    dense = outputs[DENSE]
    return tuple(labelled.mcnemar(DENSE, dense, name, rows, labels) for name, rows in outputs.items() if name != DENSE)
