"""PURE: errors of logits per input and per token, in float64. N inputs, T tokens of each, C classes.

A single logit separates two classes by a threshold.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ground.records import Figure
from perf.stats.decision import percent

from .rows import Bools, CommonMeasures, Floats, OutputKind, RowPair, bounded_share

LOGITS = OutputKind(
    name="logits",
    shape="[images, classes]",
    rank=2,
    inputs="images",
    values="pixel values",
    hint="run both on the same images with the same classifier head",
)
TOKEN_LOGITS = OutputKind(
    name="token logits",
    shape="[inputs, tokens, classes]",
    rank=3,
    hint="run both on the same inputs, padded alike, with the same classifier head",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitMeasures(CommonMeasures):
    """Errors of the logits of images: KL in nats from the reference's softmax, agreement with Wilson's 95 % bounds.

    A flip is decisive if the reference's margin (gap of the two largest) exceeds margin_noise. A single logit has a
    `threshold` and `positives`, the images above it; if all or none are above it, top1_agreement is None.
    """

    output_kind: ClassVar[OutputKind] = LOGITS
    share: ClassVar[str] = "top1_agreement"
    agreement_name: ClassVar[str] = "top-1 agreement"

    top1_agreement: float | None
    top1_agreement_low: float | None
    top1_agreement_high: float | None
    top5_overlap: Figure
    kl_mean: Figure
    kl_max: Figure
    flips: int
    margin_noise: float
    decisive_images: int
    decisive_flips: int
    threshold: float | None = None
    positives: int | None = None

    @property
    def agreement_line(self) -> str:
        if self.top1_agreement is None:
            side = "above" if self.positives else "at or below"
            return (
                f"the reference is {side} {self.threshold:g} on every image, so that no agreement is defined; give "
                "images of both classes or another --logit-threshold, or limit the error instead"
            )
        side = "" if self.threshold is None else f" (on the same side of {self.threshold:g})"
        return f"{self.agreement_name} {percent(self.top1_agreement)}{side}"

    @property
    def disagreement_line(self) -> str:
        return f"{self.flips} of {self.images} images flipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogitMeasures(CommonMeasures):
    """Errors of the logits of tokens; Wilson's bounds count each input once, because its tokens are similar."""

    output_kind: ClassVar[OutputKind] = TOKEN_LOGITS
    share: ClassVar[str] = "token_agreement"
    agreement_name: ClassVar[str] = "token agreement"

    tokens: int
    token_agreement: Figure
    token_agreement_low: Figure
    token_agreement_high: Figure
    kl_mean: Figure
    kl_max: Figure
    flips: int
    margin_noise: float
    decisive_tokens: int
    decisive_flips: int

    @property
    def disagreement_line(self) -> str:
        return f"{self.flips} of {self.tokens} tokens flipped"


def threshold_of(reference_NC: NDArray[np.floating], threshold: float | None) -> float | None:
    """Return a single logit's threshold, by default 0, or 0.5 for values in [0, 1]; None for several classes."""
    if reference_NC.ndim > 1 and reference_NC.shape[1] != 1:
        return None
    if threshold is not None:
        return threshold
    return 0.5 if reference_NC.min() >= 0 and reference_NC.max() <= 1 else 0.0


def with_two_classes(rows: RowPair, threshold: float | None) -> RowPair:
    """Return rows with the threshold as the first class and a single logit as the second; others unchanged."""
    if threshold is None:
        return rows
    sides = (np.hstack((np.full_like(side, threshold), side)) for side in (rows.reference_NF, rows.candidate_NF))
    reference_NF, candidate_NF = sides
    return replace(rows, reference_NF=reference_NF, candidate_NF=candidate_NF)


def measure_logits(
    reference_NC: NDArray[np.floating],
    candidate_NC: NDArray[np.floating],
    *,
    margin_noise: float = 0.0,
    threshold: float | None = None,
) -> LogitMeasures:
    """Return the errors over all images. Raises BadInput for shapes that differ and a non-finite reference."""
    rows = LOGITS.rows(reference_NC, candidate_NC)
    between = threshold_of(reference_NC, threshold)
    classes = with_two_classes(rows, between)
    of_rows = _, margin_N, agrees_N = classify_rows(classes)
    images, positives = len(agrees_N), None if between is None else int((rows.reference_NF > between).sum())
    agreeing = None if positives in (0, images) else int(agrees_N.sum()) / images
    return LogitMeasures(
        **_common_figures(rows, *of_rows, margin_noise),
        **bounded_share("top1_agreement", agreeing, images),
        top5_overlap=float(top5_overlap(classes).mean()),
        decisive_images=int((margin_N > margin_noise).sum()),
        threshold=between,
        positives=positives,
    )


def measure_token_logits(
    reference_NTC: NDArray[np.floating], candidate_NTC: NDArray[np.floating], *, margin_noise: float
) -> TokenLogitMeasures:
    by_input = TOKEN_LOGITS.rows(reference_NTC, candidate_NTC)
    rows = _rows_of_tokens(reference_NTC, candidate_NTC)
    of_rows = _, margin_N, agrees_N = classify_rows(rows)
    images = len(reference_NTC)
    return TokenLogitMeasures(
        **_common_figures(rows, *of_rows, margin_noise)
        | {"images": images, "nonfinite_images": images - int(by_input.finite_N.sum())},
        tokens=len(agrees_N),
        **bounded_share("token_agreement", float(agrees_N.mean()), images),
        decisive_tokens=int((margin_N > margin_noise).sum()),
    )


def margins(logits_NC: NDArray[np.floating]) -> Floats:
    """Return the largest minus the second largest logit of each image, infinite for a single class."""
    if logits_NC.shape[1] == 1:
        return np.full(len(logits_NC), np.inf)
    top_N2 = np.sort(logits_NC.astype(np.float64), axis=1)[:, -2:]
    return np.asarray(top_N2[:, 1] - top_N2[:, 0], dtype=np.float64)


def token_agreements(reference_NTC: NDArray[np.floating], candidate_NTC: NDArray[np.floating]) -> Floats:
    rows = _rows_of_tokens(reference_NTC, candidate_NTC)
    return np.asarray(_rows_agree(rows).reshape(reference_NTC.shape[:2]).mean(axis=1), dtype=np.float64)


def _common_figures(
    rows: RowPair, kl_N: Floats, margin_N: Floats, agrees_N: Bools, margin_noise: float
) -> dict[str, Any]:
    assert margin_noise >= 0, margin_noise
    return rows.figures() | {
        "kl_mean": float(kl_N.mean()),
        "kl_max": float(kl_N.max()),
        "flips": int((~agrees_N).sum()),
        "margin_noise": margin_noise,
        "decisive_flips": int(((margin_N > margin_noise) & ~agrees_N).sum()),
    }


def _rows_of_tokens(reference_NTC: NDArray[np.floating], candidate_NTC: NDArray[np.floating]) -> RowPair:
    flat = (side.reshape(-1, side.shape[-1]) for side in (reference_NTC, candidate_NTC))
    return LOGITS.rows(*flat)


def classify_rows(rows: RowPair) -> tuple[Floats, Floats, Bools]:
    """Return KL, the reference's margin and agreement of each row; non-finite ones have infinite KL and disagree."""
    log_p_NC, log_q_NC = log_softmax(rows.reference_NF), log_softmax(rows.candidate_NF)
    kl_N = np.maximum((np.exp(log_p_NC) * (log_p_NC - log_q_NC)).sum(axis=1), 0.0)
    return rows.filled_where_nonfinite(kl_N, np.inf), margins(rows.reference_NF), _rows_agree(rows)


def top5_overlap(rows: RowPair) -> Floats:
    """Return the share of the reference's top five classes that are in the candidate's top five, per row."""
    kept = min(5, rows.reference_NF.shape[1])
    sides = rows.reference_NF, rows.candidate_NF
    ref_NK, cand_NK = (np.argsort(-side, axis=1, kind="stable")[:, :kept] for side in sides)
    return rows.filled_where_nonfinite((ref_NK[:, :, None] == cand_NK[:, None, :]).any(axis=2).mean(axis=1), 0.0)


def _rows_agree(rows: RowPair) -> Bools:
    agrees_N: Bools = (rows.reference_NF.argmax(axis=1) == rows.candidate_NF.argmax(axis=1)) & rows.finite_N
    return agrees_N


def log_softmax(logits_NC: Floats) -> Floats:
    shifted_NC = logits_NC - logits_NC.max(axis=1, keepdims=True)
    return np.asarray(shifted_NC - np.log(np.exp(shifted_NC).sum(axis=1, keepdims=True)), dtype=np.float64)
