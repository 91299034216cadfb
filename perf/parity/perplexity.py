"""PURE: perplexity of logits on texts, relative to a reference's, with bootstrap intervals over sequences.

Shapes: S sequences, T tokens of one, V words; computed in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure
from perf.stats.stats import DEFAULT_CONFIDENCE, bootstrap_ends

from .logits import log_softmax
from .rows import Floats

DRAWS = 2000
LEAST_SEQUENCES = 5
"""Fewer sequences give no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    value: Figure
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMeasures:
    """Means over the tokens of a sequence: nats of the next token, agreement with the reference, and KL in nats."""

    nats: float
    agreement: float
    kl: float


def measure_sequence(
    reference_TV: NDArray[np.floating], candidate_TV: NDArray[np.floating], ids_T: NDArray[np.integer]
) -> SequenceMeasures:
    """Measure one sequence of ids. Raises BadInput for other shapes, one token, or a reference that is not finite."""
    shape = reference_TV.shape
    if len(shape) != 2 or candidate_TV.shape != shape or ids_T.shape != shape[:1] or len(ids_T) < 2:
        raise BadInput(
            f"perplexity: logits {list(shape)} and {list(candidate_TV.shape)} of {len(ids_T)} tokens; expected "
            "[tokens, words] of both, for at least 2 tokens"
        )
    if not np.isfinite(reference_TV).all():
        raise BadInput("perplexity: the reference's logits hold NaN or Inf; the model is damaged or diverged")
    if not np.isfinite(candidate_TV).all():
        return SequenceMeasures(nats=np.inf, agreement=0.0, kl=np.inf)
    ours_TV, theirs_TV = (log_softmax(each[:-1].astype(np.float64)) for each in (reference_TV, candidate_TV))
    places = np.arange(len(ids_T) - 1)
    return SequenceMeasures(
        nats=float(-theirs_TV[places, ids_T[1:]].mean()),
        agreement=float((ours_TV.argmax(axis=1) == theirs_TV.argmax(axis=1)).mean()),
        kl=float((np.exp(ours_TV) * (ours_TV - theirs_TV)).sum(axis=1).mean()),
    )


def _bootstrap_range(value_S: Floats, confidence: float, change: Callable[[Floats], Floats] = lambda x: x) -> Range:
    """Return `change` of the mean over sequences with bootstrap bounds, None for too few or non-finite sequences."""
    value = float(change(value_S.mean(keepdims=True))[0])
    if confidence == 0:
        return Range(value=value, low=value, high=value)
    if len(value_S) < LEAST_SEQUENCES or not np.isfinite(value_S).all():
        return Range(value=value, low=None, high=None)

    def means(drawn_DS: NDArray[np.int64]) -> Floats:
        return change(value_S[drawn_DS].mean(axis=1))

    low, high = bootstrap_ends(means, len(value_S), confidence, draws=DRAWS)
    return Range(value=value, low=min(low, value), high=max(high, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageMeasures:
    """Measures of one model on texts: perplexity (exp of mean nats), its ratio to the reference's, agreement and KL."""

    model: str
    sequences: int
    tokens: int
    nats: Figure
    perplexity: Range
    ratio: Range
    agreement: Range
    kl: Range


def measure_language(
    model: str,
    rows: list[SequenceMeasures],
    reference: list[SequenceMeasures],
    *,
    tokens: int,
    confidence: float = DEFAULT_CONFIDENCE,
) -> LanguageMeasures:
    nats_S, ours_S = (np.array([row.nats for row in side], dtype=np.float64) for side in (rows, reference))
    return LanguageMeasures(
        model=model,
        sequences=len(rows),
        tokens=tokens * len(rows),
        nats=float(nats_S.mean()),
        perplexity=_bootstrap_range(nats_S, confidence, np.exp),
        ratio=_bootstrap_range(nats_S - ours_S, confidence, np.exp),
        agreement=_bootstrap_range(np.array([row.agreement for row in rows]), confidence),
        kl=_bootstrap_range(np.array([row.kl for row in rows]), confidence),
    )
