"""PURE: how far a candidate's embeddings and feature maps are from a reference's. N inputs, F features of each.

An embedding is used by its angle to others, so that it agrees where the nearest of the other inputs stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.records import Figure

from .labels import wilson
from .rows import Answers, AnyMeasures, Bools, Floats, Rows

EMBEDDING = Answers(
    what="embedding",
    shape="[inputs, features]",
    rank=2,
    inputs="inputs",
    values="input values",
    hint="run both on the same inputs",
)
FEATURE_MAP = Answers(
    what="feature map",
    shape="[inputs, ...]",
    rank=None,
    inputs="inputs",
    values="input values",
    hint="run both on the same inputs",
)
LEAST_INPUTS = 3  # with two, each is the other's nearest
# Cosines nearer than this are one in float32; of two equal inputs either may come first.
TIE = 1e-6
# Rows of the table of cosines that are in memory at a time.
CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMeasures(AnyMeasures):
    """Errors of the embeddings of a whole set of inputs.

    neighbour_agreement is the share of inputs whose nearest neighbour among the others, by cosine, is the reference's,
    with Wilson's bounds at 95 %; None for fewer than 3 inputs. The rest is as in LogitMeasures.
    """

    images: int
    relative_error: Figure
    max_abs: Figure
    cosine_mean: Figure
    cosine_min: Figure
    neighbour_agreement: float | None
    neighbour_agreement_low: float | None
    neighbour_agreement_high: float | None
    nonfinite_images: int
    spread_ratio: Figure

    @property
    def inputs(self) -> str:
        return EMBEDDING.inputs

    @property
    def decisive_flips(self) -> int:
        """An angle has no margin."""
        return 0

    @property
    def agreement(self) -> float | None:
        return self.neighbour_agreement

    @property
    def agreement_bounds(self) -> tuple[float, float] | None:
        low, high = self.neighbour_agreement_low, self.neighbour_agreement_high
        return None if low is None or high is None else (low, high)

    @property
    def agreement_line(self) -> str:
        if self.neighbour_agreement is None:
            return f"nearest neighbours need {LEAST_INPUTS} inputs, got {self.images}"
        return f"nearest neighbours agree on {self.neighbour_agreement:.2%}"

    @property
    def disagreement_line(self) -> str:
        moved = round((1 - (self.neighbour_agreement or 0.0)) * self.images)
        return f"{moved} of {self.images} inputs have another nearest neighbour"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMapMeasures(AnyMeasures):
    """Errors of the feature maps of a whole set of inputs; of them no agreement is defined."""

    images: int
    relative_error: Figure
    max_abs: Figure
    cosine_mean: Figure
    cosine_min: Figure
    nonfinite_images: int
    spread_ratio: Figure

    @property
    def inputs(self) -> str:
        return FEATURE_MAP.inputs

    @property
    def decisive_flips(self) -> int:
        return 0

    @property
    def agreement(self) -> float | None:
        return None

    @property
    def agreement_bounds(self) -> tuple[float, float] | None:
        return None

    @property
    def agreement_line(self) -> str:
        return f"cosine {self.cosine_mean:.6f}"

    @property
    def disagreement_line(self) -> str:
        return ""


def embedding_measures(reference_NF: NDArray[np.floating], candidate_NF: NDArray[np.floating]) -> EmbeddingMeasures:
    """See EmbeddingMeasures. Raises BadInput when the shapes differ or the reference is not finite."""
    rows = EMBEDDING.rows(reference_NF, candidate_NF)
    agrees_N = same_neighbour(rows)
    errors, images = rows.errors(), len(rows.finite_N)
    low, high = (None, None) if agrees_N is None else wilson(int(agrees_N.sum()), images)
    return EmbeddingMeasures(
        images=images,
        relative_error=rows.relative_error(),
        max_abs=float(errors.max_abs_N.max()),
        cosine_mean=float(errors.cosine_N.mean()),
        cosine_min=float(errors.cosine_N.min()),
        neighbour_agreement=None if agrees_N is None else float(agrees_N.mean()),
        neighbour_agreement_low=low,
        neighbour_agreement_high=high,
        nonfinite_images=images - int(rows.finite_N.sum()),
        spread_ratio=rows.spread_ratio(),
    )


def feature_map_measures(reference: NDArray[np.floating], candidate: NDArray[np.floating]) -> FeatureMapMeasures:
    """See FeatureMapMeasures. Raises BadInput as embedding_measures does."""
    rows = FEATURE_MAP.rows(reference, candidate)
    errors, images = rows.errors(), len(rows.finite_N)
    return FeatureMapMeasures(
        images=images,
        relative_error=rows.relative_error(),
        max_abs=float(errors.max_abs_N.max()),
        cosine_mean=float(errors.cosine_N.mean()),
        cosine_min=float(errors.cosine_N.min()),
        nonfinite_images=images - int(rows.finite_N.sum()),
        spread_ratio=rows.spread_ratio(),
    )


def same_neighbour(rows: Rows) -> Bools | None:
    """Whether each input's nearest neighbour in the candidate is a nearest one in the reference (within TIE); None for
    fewer than 3 inputs. Inputs without a finite answer have and are no neighbour.
    """
    count = len(rows.finite_N)
    if count < LEAST_INPUTS:
        return None
    reference_NF, candidate_NF = _unit(rows.reference_NF), _unit(rows.candidate_NF)
    agrees_N = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, CHUNK):
        chunk = np.arange(start, min(start + CHUNK, count))
        theirs_PN = _cosines(candidate_NF, chunk)
        theirs_PN[:, ~rows.finite_N] = -np.inf
        ours_PN = _cosines(reference_NF, chunk)
        own = np.take_along_axis(ours_PN, theirs_PN.argmax(axis=1)[:, None], axis=1)[:, 0]
        agrees_N[chunk] = own >= ours_PN.max(axis=1) - TIE
    return agrees_N & rows.finite_N


def _cosines(unit_NF: Floats, chunk: NDArray[np.integer]) -> Floats:
    """Of some inputs with all; with themselves -inf."""
    cosines_PN: Floats = unit_NF[chunk] @ unit_NF.T
    cosines_PN[np.arange(len(chunk)), chunk] = -np.inf
    return cosines_PN


def _unit(rows_NF: Floats) -> Floats:
    norms_N1 = np.linalg.norm(rows_NF, axis=1, keepdims=True)
    return np.asarray(rows_NF / np.where(norms_N1 > 0, norms_N1, 1.0), dtype=np.float64)
