"""PURE: the measures of an output by what it is for, and one figure per input for the side file."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.ports import OutputPort, Role

from .logits import (
    LogitMeasures,
    PerImage,
    TokenLogitMeasures,
    logit_measures,
    per_image,
    token_logit_measures,
    tokens_agreeing,
)
from .maps import THRESHOLD, MapMeasures, PerMap, map_measures, per_map
from .rows import AnyMeasures, Floats, RowErrors
from .similarity import same_neighbour
from .vectors import LEAST_INPUTS, EmbeddingMeasures, FeatureMapMeasures, embedding_measures, feature_map_measures

if TYPE_CHECKING:
    Measures: TypeAlias = LogitMeasures | TokenLogitMeasures | EmbeddingMeasures | FeatureMapMeasures | MapMeasures
else:
    Measures = AnyMeasures

MEASURES: Mapping[Role, type[Measures]] = {
    "logits": LogitMeasures,
    "token logits": TokenLogitMeasures,
    "embedding": EmbeddingMeasures,
    "feature map": FeatureMapMeasures,
    "score map": MapMeasures,
}
SHARES = frozenset(
    field.name
    for kind in MEASURES.values()
    for names in [{each.name for each in fields(kind)}]
    for field in fields(kind)
    if f"{field.name}_low" in names
)
"""The measures that are shares of inputs, which have an interval."""
CLASSIFYING: tuple[Role, ...] = ("logits", "token logits")
Array = NDArray[np.floating]


@overload
def measures(
    reference: Array, candidate: Array, *, role: Literal["logits"] = ..., margin_noise: float = ...
) -> LogitMeasures: ...
@overload
def measures(
    reference: Array, candidate: Array, *, role: Role, margin_noise: float = ..., threshold: float = ...
) -> Measures: ...
def measures(
    reference: Array,
    candidate: Array,
    *,
    role: Role = "logits",
    margin_noise: float = 0.0,
    threshold: float = THRESHOLD,
) -> Measures:
    """The errors of a candidate over all inputs, both [N, ...] of one role; flips on margins up to `margin_noise` are
    not decisive, and what a score map shows is above `threshold`. Raises BadInput when the shapes differ or aren't the
    role's, or the reference is not finite.
    """
    match role:
        case "logits":
            return logit_measures(reference, candidate, margin_noise=margin_noise)
        case "token logits":
            return token_logit_measures(reference, candidate, margin_noise=margin_noise)
        case "embedding":
            return embedding_measures(reference, candidate)
        case "feature map":
            return feature_map_measures(reference, candidate)
        case "score map":
            return map_measures(reference, candidate, threshold=threshold)


def relative_errors(reference: Array, candidate: Array, *, role: Role = "logits") -> Floats:
    """||candidate - reference|| / ||reference|| of each input [N]; inf where the candidate is not finite."""
    if role == "score map":
        return per_map(reference, candidate).relative_error_N
    return MEASURES[role].output_kind.rows(reference, candidate).errors().relative_error_N


def largest_logit(reference: Array, role: Role) -> float:
    """The largest absolute logit; 0 for what has no classes, and so no margin between them."""
    return float(np.abs(reference).max()) if role in CLASSIFYING else 0.0


def require_agreement(port: OutputPort, inputs: int) -> None:
    """Raises BadInput where a least agreement was asked of an output on which inputs can't agree or differ."""
    if port.role == "embedding" and inputs < LEAST_INPUTS:
        raise BadInput(
            f"min agreement: {port.name} is an embedding, whose nearest neighbours need {LEAST_INPUTS} inputs, got "
            f"{inputs}; give more inputs, or set a largest relative error (max error) instead"
        )


def figures(
    reference: Array, candidates: Mapping[str, Array], *, role: Role = "logits", threshold: float = THRESHOLD
) -> dict[str, NDArray[np.generic]]:
    """One figure per input and candidate, for the side file: arrays [N] named `<candidate>.kl` and so on."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, candidate in candidates.items():
        own = _figures(reference, candidate, role, threshold)
        arrays |= {key if key == "margin" else f"{name}.{key}": values for key, values in own.items()}
    return arrays


def _figures(reference: Array, candidate: Array, role: Role, threshold: float) -> dict[str, NDArray[np.generic]]:
    first: dict[str, NDArray[np.generic]] = {}
    own: dict[str, NDArray[np.generic]] = {}
    each: PerImage | PerMap | RowErrors
    if role == "logits":
        each = image = per_image(reference, candidate)
        first = {"margin": image.margin_N}
        own = {"kl": image.kl_N, "top5_overlap": image.top5_overlap_N, "agrees": image.agrees_N}
    elif role == "score map":
        each = place = per_map(reference, candidate, threshold=threshold)
        own = {"iou": place.iou_N, "pixel_agreement": place.agreement_N}
    else:
        rows = MEASURES[role].output_kind.rows(reference, candidate)
        each = rows.errors()
        if role == "token logits":
            own = {"token_agreement": tokens_agreeing(reference, candidate)}
        elif role == "embedding":
            agrees_N = same_neighbour(rows.reference_NF, rows.candidate_NF, rows.finite_N)
            own = {} if agrees_N is None else {"agrees": agrees_N}
    common = {"relative_error": each.relative_error_N, "max_abs": each.max_abs_N, "cosine": each.cosine_N}
    return first | common | own
