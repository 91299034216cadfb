"""PURE: accuracy on labels and by class, McNemar's test, and records of own measures and of compared artefacts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Sha256
from perf.stats.decision import paired_interval, wilson
from perf.stats.stats import Interval

from .logits import threshold_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Top-1 accuracy with its 95 % Wilson interval.

    `chance` is the accuracy of answers that are independent of the labels and have the same class frequencies.
    """

    model: str
    correct: int
    images: int
    accuracy: float
    low: float
    high: float
    chance: float | None = None

    @property
    def is_near_chance(self) -> bool:
        return self.chance is not None and self.low <= self.chance


def _paired_change(gained: int, lost: int, images: int) -> Interval:
    low, high = paired_interval(gained, lost, images)
    return Interval(value=(gained - lost) / images, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAccuracy:
    """Counts of images that only one of two models gets right, with McNemar's exact p value."""

    a: str
    b: str
    only_a: int
    only_b: int
    p_value: float

    def change(self, images: int) -> Interval:
        """Return the accuracy of `b` minus that of `a` on this many images, with its paired 95 % interval."""
        return _paired_change(self.only_b, self.only_a, images)

    @property
    def line(self) -> str:
        return f"{self.only_a} images right in {self.a} alone, {self.only_b} here alone (McNemar p {self.p_value:.2g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAccuracy:
    """Counts of the images of one class: all, those that the dense model gets right, and those that only one does.

    `lost` are right in the dense model alone, `gained` in the shipped artefact alone. `name` is None if it is unknown.
    """

    index: int
    images: int
    correct: int
    lost: int
    gained: int
    name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.lost <= self.correct <= self.images - self.gained <= self.images or not self.images:
            raise BadInput(
                f"class {self.index}: got {self.correct} right of {self.images}, {self.lost} lost and {self.gained} "
                "gained, expected at most the right ones lost, and at most the wrong ones gained"
            )

    @property
    def accuracy_dense(self) -> float:
        return self.correct / self.images

    @property
    def accuracy(self) -> float:
        return (self.correct - self.lost + self.gained) / self.images

    @property
    def change(self) -> Interval:
        """The accuracy minus the dense model's, with its paired 95 % interval."""
        return _paired_change(self.gained, self.lost, self.images)


def accuracy_on_labels(
    model: str, logits_NC: NDArray[np.floating], labels_N: NDArray[np.integer], *, threshold: float | None = None
) -> Accuracy:
    """Return the accuracy on labels [N] of logits [N, C], or of a single logit [N, 1] with a threshold.

    Logits that are not finite count as wrong. Raises BadInput for labels that don't fit.
    """
    answers_N = _checked_classes(model, logits_NC, labels_N, threshold)
    correct, images = int((answers_N == labels_N).sum()), len(labels_N)
    low, high = wilson(correct, images)
    classes = max(int(answers_N.max()), int(labels_N.max())) + 1
    shares = [np.bincount(side_N[side_N >= 0], minlength=classes) / images for side_N in (answers_N, labels_N)]
    return Accuracy(
        model=model,
        correct=correct,
        images=images,
        accuracy=correct / images,
        low=low,
        high=high,
        chance=None if len(np.unique(labels_N)) == 1 else float(np.dot(*shares)),
    )


def mcnemar(
    a: str,
    logits_a_NC: NDArray[np.floating],
    b: str,
    logits_b_NC: NDArray[np.floating],
    labels_N: NDArray[np.integer],
    *,
    threshold: float | None = None,
) -> PairedAccuracy:
    """Return counts of images that one model alone gets right, with McNemar's exact two-sided p value."""
    right_a_N, right_b_N = (
        _checked_classes(model, logits_NC, labels_N, threshold) == labels_N
        for model, logits_NC in ((a, logits_a_NC), (b, logits_b_NC))
    )
    only_a, only_b = int((right_a_N & ~right_b_N).sum()), int((right_b_N & ~right_a_N).sum())
    tosses = only_a + only_b
    log_ways = (
        math.lgamma(tosses + 1) - math.lgamma(few + 1) - math.lgamma(tosses - few + 1)
        for few in range(min(only_a, only_b) + 1)
    )
    p_value = min(1.0, 2 * math.fsum(math.exp(log_count - tosses * math.log(2)) for log_count in log_ways))
    return PairedAccuracy(a=a, b=b, only_a=only_a, only_b=only_b, p_value=p_value)


def accuracy_by_class(
    dense_NC: NDArray[np.floating],
    shipped_NC: NDArray[np.floating],
    labels_N: NDArray[np.integer],
    names: Mapping[int, str],
    *,
    threshold: float | None = None,
) -> tuple[ClassAccuracy, ...]:
    """Return the counts of every class that has images, by index."""
    right_N, shipped_right_N = (
        _checked_classes("the classes", logits_NC, labels_N, threshold) == labels_N
        for logits_NC in (dense_NC, shipped_NC)
    )
    kept = (np.full(len(labels_N), True), right_N, right_N & ~shipped_right_N, ~right_N & shipped_right_N)
    counts = zip(
        *(np.bincount(labels_N[each_N], minlength=labels_N.max() + 1).tolist() for each_N in kept), strict=True
    )
    return tuple(
        ClassAccuracy(index=index, images=images, correct=correct, lost=lost, gained=gained, name=names.get(index))
        for index, (images, correct, lost, gained) in enumerate(counts)
        if images
    )


def predicted_classes(logits_NC: NDArray[np.floating], threshold: float | None = None) -> NDArray[np.int64]:
    """Return the class [N] of each image: the largest logit, or 1 if a single logit lies above the threshold."""
    rows_NC = logits_NC.reshape(len(logits_NC), -1)
    between = threshold_of(rows_NC, threshold)
    classes_N: NDArray[np.int64] = rows_NC.argmax(axis=1)
    return classes_N if between is None else (rows_NC[:, 0] > between).astype(np.int64)


def _checked_classes(
    model: str, logits_NC: NDArray[np.floating], labels_N: NDArray[np.integer], threshold: float | None
) -> NDArray[np.int64]:
    if logits_NC.ndim not in (1, 2) or labels_N.shape != logits_NC.shape[:1] or len(labels_N) == 0:
        raise BadInput(
            f"labels for {model}: got {labels_N.shape} labels for logits {logits_NC.shape}, expected one label "
            "per image; give the labels of exactly these images, in their order"
        )
    rows_NC = logits_NC.reshape(len(logits_NC), -1)
    finite_N, most = np.isfinite(rows_NC).all(axis=1), max(rows_NC.shape[1] - 1, 1)
    if labels_N.min() < 0 or labels_N.max() > most:
        raise BadInput(
            f"labels for {model}: got classes {labels_N.min()} to {labels_N.max()}, expected 0 to {most}; labels are "
            "class indices in the model's own order, or 0 and 1 of a model with one logit"
        )
    return np.where(finite_N, predicted_classes(rows_NC, threshold), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    """A user's own measure of the artefact labelled `model`; `sha256` is the digest of command, files and labels.

    A measure with a value for each image has `images`, the standard error `error` of the mean, and `change_error`, that
    of the mean's difference from the reference's.
    """

    name: str
    model: str
    value: float
    command: str
    sha256: Sha256
    images: int | None = None
    error: float | None = None
    change_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedArtefact:
    """A compared artefact: the library that built or ran it, its target GPUs (SM 86 is "86") and its ONNX file."""

    label: str
    backend: str
    version: str
    targets: tuple[str, ...]
    precision: str
    graph_sha256: Sha256
    sha256: Sha256

    @property
    def line(self) -> str:
        where = f" for SM {', '.join(self.targets)}" if self.targets else ""
        return f"{self.label}: {self.backend} {self.version}{where}, {self.precision}, graph {self.graph_sha256[:12]}"
