"""PURE: errors of score maps, one map at a time in float64. N inputs, K classes, H x W pixels.

[N,H,W] and [N,1,H,W] are scores of one class with a threshold; in [N,K,H,W] the highest score is the class.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure
from perf.stats.decision import percent

from .rows import Floats, OutputKind, RowErrors, WithoutMargins, bounded_share, safe_ratio

SCORE_MAP = OutputKind(
    name="score map",
    shape="[inputs, height, width] or [inputs, classes, height, width]",
    rank=None,
    hint="run both on the same inputs, with the same head",
)
RANKS = (3, 4)
THRESHOLD = 0.5
Maps = NDArray[np.floating]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateHead:
    """A separate head: its file, the outputs that it reads, and the score maps that it computes."""

    file: str
    sha256: str
    reads: tuple[str, ...]
    maps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapMeasures(WithoutMargins):
    """Errors of the score maps of a set of inputs.

    iou is the intersection over union of pixels above the threshold over all inputs, 1 if both sides are empty, and for
    several classes the mean over those present. iou_worst is the lowest of an input. pixel_agreement has Wilson's
    bounds, with each input counted once. threshold is None for several classes.
    """

    output_kind: ClassVar[OutputKind] = SCORE_MAP
    share: ClassVar[str] = "pixel_agreement"
    agreement_name: ClassVar[str] = "pixel agreement"

    relative_error_mean: Figure
    relative_error_worst: Figure
    iou: float
    iou_worst: float
    pixel_agreement: float
    pixel_agreement_low: float
    pixel_agreement_high: float
    pixels: int
    threshold: float | None

    @property
    def overlap(self) -> float:
        return self.iou

    @property
    def agreement_line(self) -> str:
        return f"IoU {self.iou:.4f}, {self.agreement_name} {percent(self.pixel_agreement)}"

    @property
    def disagreement_line(self) -> str:
        other = round((1 - self.pixel_agreement) * self.pixels)
        return f"{other:,} of {self.pixels:,} pixels have another answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerMap(RowErrors):
    """Errors and pixel agreement of each score map, with pixel counts by class for IoU."""

    agreement_N: Floats
    reference_NK: Places
    candidate_NK: Places
    both_NK: Places
    squares_N: Floats
    off_squares_N: Floats

    @property
    def iou_N(self) -> Floats:
        counts = zip(self.reference_NK, self.candidate_NK, self.both_NK, strict=True)
        return np.asarray([_iou(*each) for each in counts])

    @property
    def iou(self) -> float:
        return _iou(*(each_NK.sum(axis=0) for each_NK in (self.reference_NK, self.candidate_NK, self.both_NK)))


def measure_each_map(reference: Maps, candidate: Maps, *, threshold: float | None = None) -> PerMap:
    if reference.ndim not in RANKS:
        raise BadInput(f"{SCORE_MAP.name}: got {list(reference.shape)}, expected {SCORE_MAP.shape}")
    SCORE_MAP.refuse_misfit(reference, candidate)
    threshold = THRESHOLD if threshold is None else threshold
    each = [_figures_of_map(*pair, threshold) for pair in zip(reference, candidate, strict=True)]
    return PerMap(**{name: np.asarray([figures[name] for figures in each]) for name in each[0]})


def measure_maps(reference: Maps, candidate: Maps, *, threshold: float) -> MapMeasures:
    each, images = measure_each_map(reference, candidate, threshold=threshold), len(reference)
    places_N = np.flatnonzero(each.finite_N)
    spreads = [_spread(maps, places_N) for maps in (candidate, reference)] if len(places_N) > 1 else [1.0, 1.0]
    total_error = safe_ratio(np.sqrt(each.off_squares_N.sum()), np.sqrt(each.squares_N.sum()))
    return MapMeasures(
        images=images,
        relative_error=total_error if each.finite_N.all() else np.inf,
        relative_error_mean=float(each.relative_error_N.mean()),
        relative_error_worst=float(each.relative_error_N.max()),
        max_abs=float(each.max_abs_N.max()),
        cosine_mean=float(each.cosine_N.mean()),
        cosine_min=float(each.cosine_N.min()),
        iou=each.iou,
        iou_worst=float(each.iou_N.min()),
        **bounded_share("pixel_agreement", float(each.agreement_N.mean()), images),
        pixels=int(np.prod(reference.shape[-2:])) * images,
        threshold=threshold if _is_of_one(reference[0]) else None,
        nonfinite_images=images - int(each.finite_N.sum()),
        spread_ratio=safe_ratio(spreads[0], spreads[1], 1.0),
    )


def _is_of_one(map_KHW: Maps) -> bool:
    return map_KHW.ndim == 2 or len(map_KHW) == 1


def _predicted_classes(map_KHW: Floats, threshold: float) -> Places:
    one = _is_of_one(map_KHW)
    return (map_KHW > threshold).reshape(-1).astype(np.int64) if one else map_KHW.argmax(axis=0).reshape(-1)


def _figures_of_map(reference_KHW: Maps, candidate_KHW: Maps, threshold: float) -> dict[str, Any]:
    ours, finite = reference_KHW.astype(np.float64), bool(np.isfinite(candidate_KHW).all())
    theirs = candidate_KHW.astype(np.float64) if finite else np.zeros_like(ours)
    classes = slice(1, 2) if _is_of_one(ours) else slice(len(ours))
    own_P, other_P = _predicted_classes(ours, threshold), _predicted_classes(theirs, threshold)
    agrees_P, off = (own_P == other_P) & finite, theirs - ours
    squares, own_squares, off_squares = ((side**2).sum() for side in (ours, theirs, off))
    cosine = safe_ratio((ours * theirs).sum(), np.sqrt(squares) * np.sqrt(own_squares), at_zero=1.0)

    def counts(answers_P: Places) -> Places:
        return np.bincount(answers_P, minlength=classes.stop)[classes]

    return {
        "relative_error_N": safe_ratio(np.sqrt(off_squares), np.sqrt(squares)) if finite else np.inf,
        "max_abs_N": np.abs(off).max() if finite else np.inf,
        "cosine_N": cosine if finite else 0.0,
        "finite_N": finite,
        "agreement_N": agrees_P.mean(),
        "reference_NK": counts(own_P),
        "candidate_NK": counts(other_P) * finite,
        "both_NK": counts(own_P[agrees_P]),
        "squares_N": squares,
        "off_squares_N": off_squares,
    }


def _iou(reference_K: Places, candidate_K: Places, both_K: Places) -> float:
    union_K = reference_K + candidate_K - both_K
    present_K = union_K > 0
    return float((both_K[present_K] / union_K[present_K]).mean()) if present_K.any() else 1.0


def _spread(maps: Maps, places_N: NDArray[np.intp]) -> float:
    mean = np.zeros(maps.shape[1:])
    for place in places_N:
        mean += maps[place].astype(np.float64) / len(places_N)
    return float(np.sqrt(sum(((maps[place] - mean) ** 2).sum() for place in places_N)))
