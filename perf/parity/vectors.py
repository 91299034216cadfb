"""PURE: how far a candidate's embeddings and feature maps are from a reference's. N inputs, F features of each.

An embedding is used by its angle to others, so that it agrees where the nearest of the other inputs stays the same;
so are the tokens of a feature map.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ground.records import Figure
from perf.stats.shares import percent, wilson

from .rows import OutputKind, WithoutMargins
from .similarity import LEAST_ROWS, drawn_rows, linear_cka, same_neighbour, token_figures

HINT = "run both on the same inputs"
EMBEDDING = OutputKind(name="embedding", shape="[inputs, features]", rank=2, hint=HINT)
FEATURE_MAP = OutputKind(name="feature map", shape="[inputs, ...]", rank=None, hint=HINT)
LEAST_INPUTS = LEAST_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingMeasures(WithoutMargins):
    """Errors of the embeddings of a whole set of inputs.

    neighbour_agreement is the share of inputs whose nearest neighbour among the others, by cosine, is the reference's,
    with Wilson's bounds at 95 %; None for fewer than 3 inputs. linear_cka is debiased and of at
    most 1,024 inputs, None for fewer than 4.
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
            return f"nearest neighbours need {LEAST_INPUTS} inputs, got {self.images}"
        return f"{self.agreement_name} {percent(self.neighbour_agreement)}"

    @property
    def disagreement_line(self) -> str:
        changed = round((1 - (self.neighbour_agreement or 0.0)) * self.images)
        return f"{changed} of {self.images} inputs have another nearest neighbour"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMapMeasures(WithoutMargins):
    """Errors of the feature maps of a whole set of inputs. cosine_mean and cosine_min are of inputs.

    Of a map of tokens [N,T,C] or [N,C,H,W]: the cosine of tokens, its mean and 1 % quantile; and of at most 1,024
    tokens drawn among all, the share whose nearest other by cosine is the reference's, with Wilson's bounds as if
    each input had been asked once, and linear CKA (debiased).
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
            return "no tokens whose nearest others could be told"
        changed = round((1 - self.neighbour_agreement) * self.tokens_compared)
        return f"{changed} of {self.tokens_compared} tokens have another nearest one"


def embedding_measures(reference_NF: NDArray[np.floating], candidate_NF: NDArray[np.floating]) -> EmbeddingMeasures:
    """See EmbeddingMeasures. Raises BadInput when the shapes differ or the reference is not finite."""
    rows = EMBEDDING.rows(reference_NF, candidate_NF)
    agrees_N = same_neighbour(rows.reference_NF, rows.candidate_NF, rows.finite_N)
    images = len(rows.finite_N)
    drawn = drawn_rows(images)
    low, high = (None, None) if agrees_N is None else wilson(int(agrees_N.sum()), images)
    return EmbeddingMeasures(
        images=images,
        **rows.figures(),
        neighbour_agreement=None if agrees_N is None else float(agrees_N.mean()),
        neighbour_agreement_low=low,
        neighbour_agreement_high=high,
        nonfinite_images=images - int(rows.finite_N.sum()),
        linear_cka=linear_cka(rows.reference_NF[drawn], rows.candidate_NF[drawn]),
    )


def feature_map_measures(reference: NDArray[np.floating], candidate: NDArray[np.floating]) -> FeatureMapMeasures:
    """See FeatureMapMeasures. Raises BadInput as embedding_measures does."""
    rows = FEATURE_MAP.rows(reference, candidate)
    images = len(rows.finite_N)
    tokens = token_figures(reference, candidate, rows.finite_N)
    agreement = None if tokens is None else tokens.neighbour_agreement
    low, high = (None, None) if agreement is None else wilson(agreement * images, images)
    return FeatureMapMeasures(
        images=images,
        **rows.figures(),
        nonfinite_images=images - int(rows.finite_N.sum()),
        token_cosine_mean=None if tokens is None else tokens.cosine_mean,
        token_cosine_q01=None if tokens is None else tokens.cosine_q01,
        tokens_compared=None if tokens is None else tokens.compared,
        neighbour_agreement=agreement,
        neighbour_agreement_low=low,
        neighbour_agreement_high=high,
        linear_cka=None if tokens is None else tokens.linear_cka,
    )
