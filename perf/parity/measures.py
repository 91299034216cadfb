"""PURE: measures of outputs by their role, and arrays of figures per input.

Embeddings, and tokens of feature maps, agree if their nearest neighbour is the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.ports import OutputPort, Role
from ground.records import Figure
from perf.stats.decision import percent

from .logits import (
    LogitMeasures,
    TokenLogitMeasures,
    classify_rows,
    measure_logits,
    measure_token_logits,
    threshold_of,
    token_agreements,
    top5_overlap,
    with_two_classes,
)
from .maps import THRESHOLD, MapMeasures, measure_each_map, measure_maps
from .rows import AnyMeasures, Floats, OutputKind, RowErrors, WithoutMargins, bounded_share
from .similarity import LEAST_ROWS, draw_rows, linear_cka, same_neighbour, token_figures

HINT = "run both on the same inputs"
EMBEDDING = OutputKind(name="embedding", shape="[inputs, features]", rank=2, hint=HINT)
FEATURE_MAP = OutputKind(name="feature map", shape="[inputs, ...]", rank=None, hint=HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMeasures(WithoutMargins):
    """Errors of the embeddings of a set of inputs.

    neighbour_agreement is the share of inputs with the same nearest neighbour by cosine, with Wilson's 95 % bounds,
    None for fewer than 3 inputs. linear_cka is debiased, over at most 1,024 inputs, None for fewer than 4.
    """

    output_kind: ClassVar[OutputKind] = EMBEDDING
    share: ClassVar[str] = "neighbour_agreement"
    agreement_name: ClassVar[str] = "agreement of nearest neighbours"

    neighbour_agreement: float | None
    neighbour_agreement_low: float | None
    neighbour_agreement_high: float | None
    linear_cka: Figure | None = None

    @property
    def agreement_line(self) -> str:
        if self.neighbour_agreement is None:
            return f"nearest neighbours need {LEAST_ROWS} inputs, got {self.images}"
        return f"{self.agreement_name} {percent(self.neighbour_agreement)}"

    @property
    def disagreement_line(self) -> str:
        changed = round((1 - (self.neighbour_agreement or 0.0)) * self.images)
        return f"{changed} of {self.images} inputs have another nearest neighbour"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMapMeasures(WithoutMargins):
    """Errors of the feature maps of a set of inputs.

    Maps of tokens [N,T,C] or [N,C,H,W] also have the mean and the 1 % quantile of the tokens' cosine, and the agreement
    of nearest neighbours and debiased linear CKA over at most 1,024 drawn tokens.
    """

    output_kind: ClassVar[OutputKind] = FEATURE_MAP
    share: ClassVar[str] = "neighbour_agreement"
    agreement_name: ClassVar[str] = "agreement of nearest tokens"

    token_cosine_mean: Figure | None = None
    token_cosine_q01: Figure | None = None
    tokens_compared: int | None = None
    neighbour_agreement: float | None = None
    neighbour_agreement_low: float | None = None
    neighbour_agreement_high: float | None = None
    linear_cka: Figure | None = None

    @property
    def agreement_line(self) -> str:
        if self.token_cosine_mean is None:
            return f"cosine {self.cosine_mean:.6f}"
        cosine = f"cosine of tokens {self.token_cosine_mean:.6f} (1 % below {self.token_cosine_q01:.6f})"
        if self.neighbour_agreement is None:
            return cosine
        return f"{cosine}, {self.agreement_name} {percent(self.neighbour_agreement)}"

    @property
    def disagreement_line(self) -> str:
        if self.neighbour_agreement is None or self.tokens_compared is None:
            return "no tokens whose nearest neighbours could be compared"
        changed = round((1 - self.neighbour_agreement) * self.tokens_compared)
        return f"{changed} of {self.tokens_compared} tokens have another nearest one"


def embedding_measures(reference_NF: NDArray[np.floating], candidate_NF: NDArray[np.floating]) -> EmbeddingMeasures:
    rows = EMBEDDING.rows(reference_NF, candidate_NF)
    agrees_N = same_neighbour(rows.reference_NF, rows.candidate_NF, rows.finite_N)
    images = len(rows.finite_N)
    drawn = draw_rows(images)
    return EmbeddingMeasures(
        **rows.figures(),
        **bounded_share("neighbour_agreement", None if agrees_N is None else float(agrees_N.mean()), images),
        linear_cka=linear_cka(rows.reference_NF[drawn], rows.candidate_NF[drawn]),
    )


def feature_map_measures(reference: NDArray[np.floating], candidate: NDArray[np.floating]) -> FeatureMapMeasures:
    rows = FEATURE_MAP.rows(reference, candidate)
    images = len(rows.finite_N)
    tokens = token_figures(reference, candidate, rows.finite_N)
    return FeatureMapMeasures(
        **rows.figures(), **tokens | bounded_share("neighbour_agreement", tokens.get("neighbour_agreement"), images)
    )


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
SHARES = frozenset(kind.share for kind in MEASURES.values())
"""Names of the measures that are shares of inputs, which have an interval."""
FIGURES = frozenset(each.name for kind in MEASURES.values() for each in fields(kind))
"""Names of the measures of all roles."""
CLASSIFYING: tuple[Role, ...] = ("logits", "token logits")
Array = NDArray[np.floating]


def measure_outputs(
    reference: Array, candidate: Array, *, role: Role, margin_noise: float = 0.0, threshold: float | None = None
) -> Measures:
    """Return a candidate's errors by the output's role, both sides [N, ...].

    Flips on margins up to `margin_noise` are not decisive. Raises BadInput if shapes differ or don't fit the role, or
    if the reference is not finite.
    """
    match role:
        case "logits":
            return measure_logits(reference, candidate, margin_noise=margin_noise, threshold=threshold)
        case "token logits":
            return measure_token_logits(reference, candidate, margin_noise=margin_noise)
        case "embedding":
            return embedding_measures(reference, candidate)
        case "feature map":
            return feature_map_measures(reference, candidate)
        case "score map":
            return measure_maps(reference, candidate, threshold=THRESHOLD if threshold is None else threshold)


def measure_relative_errors(reference: Array, candidate: Array, *, role: Role = "logits") -> Floats:
    """Return ||candidate - reference|| / ||reference|| of each input [N], infinite for a non-finite candidate."""
    if role == "score map":
        return measure_each_map(reference, candidate).relative_error_N
    return MEASURES[role].output_kind.rows(reference, candidate).errors().relative_error_N


def largest_logit(reference: Array, role: Role) -> float:
    """Return the largest absolute logit; 0 for outputs without classes."""
    return float(np.abs(reference).max()) if role in CLASSIFYING else 0.0


def require_agreement(port: OutputPort, inputs: int) -> None:
    if port.role == "embedding" and inputs < LEAST_ROWS:
        raise BadInput(
            f"min agreement: {port.name} is an embedding, whose nearest neighbours need {LEAST_ROWS} inputs, got "
            f"{inputs}; give more inputs, or set a largest relative error (max error) instead"
        )


def figures_by_input(
    reference: Array, candidates: Mapping[str, Array], *, role: Role = "logits", threshold: float | None = None
) -> dict[str, NDArray[np.generic]]:
    """Return figures per input as arrays [N]: `<candidate>.kl` and so on, and for logits the reference's `margin`."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, candidate in candidates.items():
        own: dict[str, NDArray[np.generic] | None] = {}
        each: RowErrors
        if role == "score map":
            each = place = measure_each_map(reference, candidate, threshold=threshold)
            own = {"iou": place.iou_N, "pixel_agreement": place.agreement_N}
        else:
            rows = MEASURES[role].output_kind.rows(reference, candidate)
            each = rows.errors()
            if role == "logits":
                classes = with_two_classes(rows, threshold_of(reference, threshold))
                kl_N, arrays["margin"], agrees_N = classify_rows(classes)
                own = {"kl": kl_N, "top5_overlap": top5_overlap(classes), "agrees": agrees_N}
            elif role == "token logits":
                own = {"token_agreement": token_agreements(reference, candidate)}
            elif role == "embedding":
                own = {"agrees": same_neighbour(rows.reference_NF, rows.candidate_NF, rows.finite_N)}
        own |= {"relative_error": each.relative_error_N, "max_abs": each.max_abs_N, "cosine": each.cosine_N}
        arrays |= {f"{name}.{key}": values for key, values in own.items() if values is not None}
    return arrays
