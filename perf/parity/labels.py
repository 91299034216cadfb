"""PURE: accuracy on labels with its interval, McNemar's test for two models on the same images, measures of the user's
own; and what a link's side was: the artefact, what built and runs it, and the graph it was made of.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Sha256
from perf.stats.decision import wilson


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Top-1 accuracy of one model on labelled images, with its 95 % Wilson interval."""

    model: str
    correct: int
    images: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedAccuracy:
    """Two models on the same labelled images: images that only one of them gets right, and McNemar's exact p value."""

    a: str
    b: str
    only_a: int
    only_b: int
    p_value: float


def accuracy(model: str, logits_NC: NDArray[np.floating], labels_N: NDArray[np.integer]) -> Accuracy:
    """Raises BadInput for labels that don't fit the logits; an image whose logits are not finite counts as wrong."""
    right_N = _right(model, logits_NC, labels_N)
    correct, images = int(right_N.sum()), len(right_N)
    low, high = wilson(correct, images)
    return Accuracy(model=model, correct=correct, images=images, accuracy=correct / images, low=low, high=high)


def mcnemar(
    a: str, logits_a_NC: NDArray[np.floating], b: str, logits_b_NC: NDArray[np.floating], labels_N: NDArray[np.integer]
) -> PairedAccuracy:
    """McNemar's exact test: of two equally good models, who is right alone on an image is a fair coin (two-sided)."""
    right_a_N, right_b_N = _right(a, logits_a_NC, labels_N), _right(b, logits_b_NC, labels_N)
    only_a, only_b = int((right_a_N & ~right_b_N).sum()), int((right_b_N & ~right_a_N).sum())
    tosses = only_a + only_b
    log_ways = (
        math.lgamma(tosses + 1) - math.lgamma(few + 1) - math.lgamma(tosses - few + 1)
        for few in range(min(only_a, only_b) + 1)
    )
    p_value = min(1.0, 2 * math.fsum(math.exp(log_count - tosses * math.log(2)) for log_count in log_ways))
    return PairedAccuracy(a=a, b=b, only_a=only_a, only_b=only_b, p_value=p_value)


def predicted_classes(logits_NC: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the class of each image: the largest logit, or of a single one whether it is positive."""
    rows_NC = logits_NC.reshape(len(logits_NC), -1)
    classes_N: NDArray[np.int64] = rows_NC.argmax(axis=1)
    return (rows_NC[:, 0] > 0).astype(np.int64) if rows_NC.shape[1] == 1 else classes_N


def _right(model: str, logits_NC: NDArray[np.floating], labels_N: NDArray[np.integer]) -> NDArray[np.bool_]:
    if logits_NC.ndim not in (1, 2) or labels_N.shape != logits_NC.shape[:1] or len(labels_N) == 0:
        raise BadInput(
            f"labels for {model}: got {labels_N.shape} labels for logits {logits_NC.shape}, expected one label "
            "per image; give the labels of exactly these images, in their order"
        )
    rows_NC = logits_NC.reshape(len(logits_NC), -1)
    most = max(rows_NC.shape[1] - 1, 1)
    if labels_N.min() < 0 or labels_N.max() > most:
        raise BadInput(
            f"labels for {model}: got classes {labels_N.min()} to {labels_N.max()}, expected 0 to {most}; labels are "
            "class indices in the model's own order, or 0 and 1 of a model with one logit"
        )
    right_N: NDArray[np.bool_] = (predicted_classes(rows_NC) == labels_N) & np.isfinite(rows_NC).all(axis=1)
    return right_N


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMetric:
    """`model` is the label of the artefact whose outputs were measured, `sha256` covers the command, the files that
    it names and the labels.
    """

    name: str
    model: str
    value: float
    command: str
    sha256: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`backend` and `version` are of the library that built an engine, or that ran a graph; `targets` GPUs it was built
    for (SM 86 is "86"); `graph_sha256` of the ONNX file that it was built of, or is.
    """

    label: str
    backend: str
    version: str
    targets: tuple[str, ...]
    precision: str
    graph_sha256: Sha256
    sha256: Sha256

    @property
    def line(self) -> str:
        """For people."""
        where = f" for SM {', '.join(self.targets)}" if self.targets else ""
        return f"{self.label}: {self.backend} {self.version}{where}, {self.precision}, graph {self.graph_sha256[:12]}"
