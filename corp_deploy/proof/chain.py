"""The parity chain: dense torch -> reduced torch -> ONNX FP32 -> ONNX FP16 -> engine, on real images, link by link."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile

import numpy as np
import torch
from numpy.typing import NDArray

from calib.images import Images
from calib.moments import Moments
from corp_deploy.families.family import family_of, image_spec
from corp_deploy.families.model_cost import counted
from corp_deploy.store.checkpoint import Checkpoint
from export.graph.precision import typed_copy
from perf.parity import labels as labelled
from perf.parity import structure, tolerance
from perf.parity.headroom import headroom
from perf.parity.locate import Located
from perf.parity.measures import Measures, measures
from perf.parity.parity import ImageSet, Link, LinkKind, Parity, figures, link
from perf.parity.structure import StructuralTest
from perf.parity.tolerance import Tolerance
from perf.runners.module import ModuleRunner

from .candidates import Candidate, Logits, Pixels, Run, logits_at
from .locate import located, worst_images
from .shift import pixel_range, shift_of_images

DENSE = "dense torch fp32"
HEADROOM_IMAGES = 8
# Images at the batch sizes that are not the largest, slots of the structural tests, images pushed out of range.
EACH_SIZE, SLOTS, EXTREME_IMAGES = 4, 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLimits:
    """What the user allows the reduced model to differ from the dense one by; None sets no limit."""

    min_agreement: float | None = None
    max_error: float | None = None
    half_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofInputs:
    """What a proof is made on: pixels [N,3,H,W], what they are, labels where there are any."""

    pixels: Pixels
    digest: str
    kind: str = "images"
    labels: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The parity record, and per-image figures for the file beside it."""

    parity: Parity
    figures: dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A candidate that has been run: its logits by batch size, its link, what was found about its structure."""

    candidate: Candidate
    by_batch: Mapping[int, Logits]
    link: Link
    findings: tuple[StructuralTest, ...]

    @property
    def logits(self) -> Logits:
        return self.by_batch[max(self.by_batch)]


def given_from_images(images: Images, labels: NDArray[np.int64] | None = None) -> ProofInputs:
    """All images of a source as they are fed to the model, decoded once, in a file without a name instead of memory."""
    pixels: Pixels | None = None
    done = 0
    for batch in images.batches(64):
        part = batch.numpy()
        if pixels is None:
            with TemporaryFile() as file:  # the mapping keeps it until the last array on it is gone
                pixels = np.memmap(file, dtype=np.float32, mode="w+", shape=(images.count, *part.shape[1:]))
        pixels[done : done + len(part)] = part
        done += len(part)
    assert pixels is not None, images
    return ProofInputs(pixels=pixels[:done], digest=images.digest, labels=labels)


def random_inputs(dense: Checkpoint, count: int, seed: int) -> ProofInputs:
    """Normal noise instead of images, for who asks for it; the record says so."""
    shape = image_spec(dense.model).shape
    pixels = np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)
    return ProofInputs(pixels=pixels, digest=f"random seed {seed}", kind="random")


def _half_noise(dense: Checkpoint, images: Pixels, reference: Logits, batch: int) -> Measures:
    """The dense model's own FP16-against-FP32 error on these images, with the same safe LayerNorm and softmax."""
    half = typed_copy(family_of(dense.model).exportable(dense.model), "fp16")

    def run(given: Pixels) -> Logits:
        with torch.inference_mode():
            logits: Logits = half(torch.from_numpy(given)).numpy()
        return logits

    return measures(reference, logits_at(run, images, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """Everything a link is judged by."""

    limits: ParityLimits
    noise: Measures
    products: int
    largest_logit: float

    def rounding(self, half: bool) -> Tolerance:
        """How far two computations of one model may lie apart in this precision."""
        if half:
            return tolerance.half(self.noise, factor=self.limits.half_factor)
        return tolerance.exact(products=self.products, largest_logit=self.largest_logit)

    def of_user(self) -> Tolerance:
        """What the reduced model may differ from the dense one by."""
        limits = self.limits
        return tolerance.limits(min_agreement=limits.min_agreement, max_error=limits.max_error, noise=self.noise)


def _structure(
    candidate: Candidate, run: Run, images: Pixels, by_batch: Mapping[int, Logits], bound: float
) -> list[StructuralTest]:
    """What holds for some images holds for all: the link itself judges every image at the largest batch."""
    largest = candidate.batch or max(by_batch)
    slots = min(largest, SLOTS)
    straight = by_batch[max(by_batch)]
    few = images[: max(slots, 2)]
    found = [
        structure.batch_slot(candidate.label, run, images[:1], batch=slots, bound=bound),
        structure.permutation(candidate.label, run, few, bound=bound, straight_NC=straight[: len(few)]),
        *structure.outputs(candidate.label, straight),
        structure.extremes(candidate.label, run, images[: min(slots, EXTREME_IMAGES)]),
    ]
    return found + structure.batch_sizes(candidate.label, by_batch, bound=bound)


def _by_batch(candidate: Candidate, run: Run, images: Pixels, batches: Sequence[int]) -> dict[int, Logits]:
    """All images at the largest batch size; at every other one a batch of them, and no fewer than EACH_SIZE."""
    if candidate.batch:
        return {candidate.batch: logits_at(run, images, candidate.batch)}
    largest = max(batches)
    few = {size: images[: max(size, EACH_SIZE)] for size in sorted(set(batches)) if size != largest}
    return {size: logits_at(run, some, size) for size, some in few.items()} | {largest: logits_at(run, images, largest)}


def _step(
    candidate: Candidate, before: tuple[str, Logits], given: ProofInputs, batches: Sequence[int], rules: _Rules
) -> Step:
    bound = rules.rounding(candidate.half).max_relative_error
    assert bound is not None, candidate.label
    with candidate.opened() as run:
        by_batch = _by_batch(candidate, run, given.pixels, batches)
        findings = _structure(candidate, run, given.pixels, by_batch, bound)
    kind: LinkKind = "reduced" if candidate.form == "torch" else "half" if candidate.half else "exact"
    judged = link(
        name=candidate.name,
        kind=kind,
        reference=before[0],
        candidate=candidate.label,
        reference_NC=before[1],
        candidate_by_batch=by_batch,
        tolerance=rules.of_user() if candidate.form == "torch" else rules.rounding(candidate.half),
    )
    return Step(candidate=candidate, by_batch=by_batch, link=judged, findings=tuple(findings))


def _headroom(single: Candidate | None, half: Candidate, pixels: Pixels) -> list[StructuralTest]:
    """How near an FP16 graph comes to the end of float16, computed by the FP32 graph before it."""
    if single is None or single.form != "graph" or half.form != "graph":
        return []
    return [headroom(half.label, single.path, half.path, pixels[:HEADROOM_IMAGES])]


def _whole(last: Step, dense_logits: Logits, rules: _Rules) -> Link:
    return link(
        name="whole",
        kind="whole",
        reference=DENSE,
        candidate=last.candidate.label,
        reference_NC=dense_logits,
        candidate_by_batch=last.by_batch,
        tolerance=rules.of_user(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walked:
    """All candidates run in order, what was found about their structure, and the blocks where failing links break."""

    steps: tuple[Step, ...]
    findings: tuple[StructuralTest, ...]
    blocks: tuple[Located, ...]


def _walk(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    given: ProofInputs,
    batches: Sequence[int],
    rules: _Rules,
    dense_logits: Logits,
    done: Callable[[int], None] | None,
) -> _Walked:
    """Every candidate against its reference: the dense model for torch, else the last FP32 step before it."""
    steps: list[Step] = []
    findings: list[StructuralTest] = []
    blocks: list[Located] = []
    single: Step | None = None
    for candidate in candidates:
        from_dense = candidate.form == "torch" or single is None
        before = (DENSE, dense_logits) if from_dense or single is None else (single.candidate.label, single.logits)
        previous = None if single is None else single.candidate
        step = _step(candidate, before, given, batches, rules)
        findings += step.findings
        if candidate.half:
            findings += _headroom(previous, candidate, given.pixels)
        if step.link.status == "FAIL":
            worst = worst_images(given.pixels, before[1], step.logits)
            found = located(candidate.name, candidate, previous, dense, worst, rules.products)
            blocks += [found] if found is not None else []
        single = single if candidate.half else step
        steps.append(step)
        if done is not None:
            done(len(steps))
    return _Walked(steps=tuple(steps), findings=tuple(findings), blocks=tuple(blocks))


def prove(
    dense: Checkpoint,
    candidates: Sequence[Candidate],
    given: ProofInputs,
    *,
    batches: Sequence[int],
    limits: ParityLimits,
    moments: Moments | None = None,
    done: Callable[[int], None] | None = None,
) -> Proof:
    """Compare every candidate with its predecessor and the last one with the dense model.

    A torch candidate is held against the dense model and the user's limits; an FP32 graph against the torch model it
    came from and a float32 bound; an FP16 graph or engine against the FP32 step before it and a multiple of the dense
    model's own FP16 error. A failing graph's block is located. `moments` adds the shift check. `done` is told how many
    candidates are finished. Raises BadInput for images or labels that don't fit.
    """
    with ModuleRunner(dense.model) as runner:
        dense_logits = logits_at(runner, given.pixels, max(batches))
    rules = _Rules(
        limits=limits,
        noise=_half_noise(dense, given.pixels, dense_logits, max(batches)),
        products=counted(dense.model).chain,
        largest_logit=float(np.abs(dense_logits).max()),
    )
    walked = _walk(dense, candidates, given, batches, rules, dense_logits, done)
    whole = [_whole(walked.steps[-1], dense_logits, rules)] if len(walked.steps) > 1 else []
    outputs = {DENSE: dense_logits} | {step.candidate.label: step.logits for step in walked.steps}
    return Proof(
        parity=Parity(
            images=ImageSet(count=len(given.pixels), digest=given.digest, kind=given.kind),
            links=(*(step.link for step in walked.steps), *whole),
            structure=(*walked.findings, *(pixel_range(moments, given.pixels) if moments is not None else ())),
            located=walked.blocks,
            shift=None if moments is None else shift_of_images(dense, moments, given.pixels),
            accuracy=_accuracy(outputs, given.labels),
            comparisons=_comparisons(outputs, given.labels),
        ),
        figures=figures(dense_logits, {name: rows for name, rows in outputs.items() if name != DENSE}),
    )


def _accuracy(outputs: Mapping[str, Logits], labels: NDArray[np.int64] | None) -> tuple[labelled.Accuracy, ...]:
    if labels is None:
        return ()
    return tuple(labelled.accuracy(name, rows, labels) for name, rows in outputs.items())


def _comparisons(
    outputs: Mapping[str, Logits], labels: NDArray[np.int64] | None
) -> tuple[labelled.PairedAccuracy, ...]:
    if labels is None:
        return ()
    dense = outputs[DENSE]
    return tuple(labelled.mcnemar(DENSE, dense, name, rows, labels) for name, rows in outputs.items() if name != DENSE)
