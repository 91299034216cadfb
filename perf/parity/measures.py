"""PURE: how far a candidate's logits are from a reference's on the same images. N images, C classes; float64 inside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.records import Figure

from .labels import wilson

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerImage:
    """One figure per image. Where the candidate gives NaN or Inf, errors are infinite, cosine 0 and nothing agrees."""

    relative_error_N: Floats
    max_abs_N: Floats
    cosine_N: Floats
    kl_N: Floats
    top5_overlap_N: Floats
    margin_N: Floats
    agrees_N: NDArray[np.bool_]
    finite_N: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Errors of a whole set of images.

    relative_error is ||candidate - reference||_F / ||reference||_F of the logits as they are (not centred), KL is in
    nats from the reference's softmax to the candidate's, the agreement's bounds are Wilson's at 95 %. A decisive flip
    is a top-1 flip on an image whose reference margin (first minus second logit) exceeds margin_noise. spread_ratio is
    how much the candidate's logits vary over the images, relative to the reference's; 0 is a constant output.
    """

    images: int
    relative_error: Figure
    max_abs: Figure
    cosine_mean: Figure
    cosine_min: Figure
    top1_agreement: Figure
    top1_agreement_low: Figure
    top1_agreement_high: Figure
    top5_overlap: Figure
    kl_mean: Figure
    kl_max: Figure
    flips: int
    margin_noise: float
    decisive_images: int
    decisive_flips: int
    nonfinite_images: int
    spread_ratio: Figure


def per_image(reference_NC: NDArray[np.floating], candidate_NC: NDArray[np.floating]) -> PerImage:
    """Raises BadInput when the shapes differ, there is no image, or the reference itself is not finite."""
    ref_NC, cand_NC, finite_N = _checked(reference_NC, candidate_NC)
    delta_NC = cand_NC - ref_NC
    ref_norm_N = np.linalg.norm(ref_NC, axis=1)
    norms_N = ref_norm_N * np.linalg.norm(cand_NC, axis=1)
    cosine_N = _ratio((ref_NC * cand_NC).sum(axis=1), norms_N, at_zero=1.0)
    return PerImage(
        relative_error_N=_spoilt(_ratio(np.linalg.norm(delta_NC, axis=1), ref_norm_N), finite_N, np.inf),
        max_abs_N=_spoilt(np.abs(delta_NC).max(axis=1), finite_N, np.inf),
        cosine_N=_spoilt(cosine_N, finite_N, 0.0),
        kl_N=_spoilt(_kl(ref_NC, cand_NC), finite_N, np.inf),
        top5_overlap_N=_spoilt(_overlap(ref_NC, cand_NC, top=5), finite_N, 0.0),
        margin_N=margins(ref_NC),
        agrees_N=(ref_NC.argmax(axis=1) == cand_NC.argmax(axis=1)) & finite_N,
        finite_N=finite_N,
    )


def measures(
    reference_NC: NDArray[np.floating], candidate_NC: NDArray[np.floating], *, margin_noise: float = 0.0
) -> Measures:
    """The errors of a candidate over all images; see Measures. Raises BadInput as per_image does."""
    assert margin_noise >= 0, margin_noise
    each = per_image(reference_NC, candidate_NC)
    ref_NC, cand_NC, _ = _checked(reference_NC, candidate_NC)
    images, agreeing = len(ref_NC), int(each.agrees_N.sum())
    all_finite = bool(each.finite_N.all())
    low, high = wilson(agreeing, images)
    decisive_N = each.margin_N > margin_noise
    return Measures(
        images=images,
        relative_error=_share(np.linalg.norm(cand_NC - ref_NC), np.linalg.norm(ref_NC)) if all_finite else np.inf,
        max_abs=float(each.max_abs_N.max()),
        cosine_mean=float(each.cosine_N.mean()),
        cosine_min=float(each.cosine_N.min()),
        top1_agreement=agreeing / images,
        top1_agreement_low=low,
        top1_agreement_high=high,
        top5_overlap=float(each.top5_overlap_N.mean()),
        kl_mean=float(each.kl_N.mean()),
        kl_max=float(each.kl_N.max()),
        flips=images - agreeing,
        margin_noise=margin_noise,
        decisive_images=int(decisive_N.sum()),
        decisive_flips=int((decisive_N & ~each.agrees_N).sum()),
        nonfinite_images=images - int(each.finite_N.sum()),
        spread_ratio=spread_ratio(ref_NC[each.finite_N], cand_NC[each.finite_N]),
    )


def margins(logits_NC: NDArray[np.floating]) -> Floats:
    """First minus second logit of each image; infinite with a single class, where nothing can flip."""
    if logits_NC.shape[1] == 1:
        return np.full(len(logits_NC), np.inf)
    top_N2 = np.sort(logits_NC.astype(np.float64), axis=1)[:, -2:]
    return np.asarray(top_N2[:, 1] - top_N2[:, 0], dtype=np.float64)


def spread_ratio(reference_NC: Floats, candidate_NC: Floats) -> float:
    """||candidate - its mean image||_F / ||reference - its mean image||_F; 1 where fewer than two images can tell."""
    if len(reference_NC) < 2:
        return 1.0
    candidate, reference = (np.linalg.norm(rows - rows.mean(axis=0)) for rows in (candidate_NC, reference_NC))
    return _share(candidate, reference, at_zero=1.0)


def _checked(
    reference_NC: NDArray[np.floating], candidate_NC: NDArray[np.floating]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Both in float64, the candidate's images that are not finite set to zero, and which images are finite."""
    if reference_NC.ndim != 2 and reference_NC.shape == candidate_NC.shape:
        raise BadInput(
            f"logits: got {reference_NC.shape} of both, expected [images, classes]; outputs with a vector for "
            "each token aren't compared here: give models whose output is pooled"
        )
    if reference_NC.ndim != 2 or reference_NC.shape != candidate_NC.shape or reference_NC.size == 0:
        raise BadInput(
            f"logits: got reference {reference_NC.shape} and candidate {candidate_NC.shape}, expected the same "
            "[images, classes] for both; run both on the same images with the same classifier head"
        )
    spoilt = int((~np.isfinite(reference_NC)).any(axis=1).sum())
    if spoilt:
        raise BadInput(
            f"logits: the reference gives NaN or Inf on {spoilt} of {len(reference_NC)} images, so nothing can "
            "be compared with it; look for (a) bad pixel values, (b) weights that don't fit the model"
        )
    finite_N = np.isfinite(candidate_NC).all(axis=1)
    return reference_NC.astype(np.float64), np.where(finite_N[:, None], candidate_NC, 0).astype(np.float64), finite_N


def _spoilt(values_N: Floats, finite_N: NDArray[np.bool_], worst: float) -> Floats:
    return np.where(finite_N, values_N, worst)


def _ratio(top_N: Floats, bottom_N: Floats, at_zero: float = 0.0) -> Floats:
    """top / bottom; where the bottom is zero, `at_zero` if the top is zero too, else inf."""
    safe_N = np.where(bottom_N > 0, bottom_N, 1.0)
    return np.where(bottom_N > 0, top_N / safe_N, np.where(top_N == 0, at_zero, np.inf))


def _share(top: float | np.floating, bottom: float | np.floating, at_zero: float = 0.0) -> float:
    return float(_ratio(np.asarray([float(top)]), np.asarray([float(bottom)]), at_zero)[0])


def _log_softmax(logits_NC: Floats) -> Floats:
    shifted_NC = logits_NC - logits_NC.max(axis=1, keepdims=True)
    return np.asarray(shifted_NC - np.log(np.exp(shifted_NC).sum(axis=1, keepdims=True)), dtype=np.float64)


def _kl(ref_NC: Floats, cand_NC: Floats) -> Floats:
    log_p_NC, log_q_NC = _log_softmax(ref_NC), _log_softmax(cand_NC)
    kl_N: Floats = (np.exp(log_p_NC) * (log_p_NC - log_q_NC)).sum(axis=1)
    return np.maximum(kl_N, 0.0)


def _overlap(ref_NC: Floats, cand_NC: Floats, *, top: int) -> Floats:
    """Share of the reference's first `top` classes that are among the candidate's first `top`."""
    kept = min(top, ref_NC.shape[1])
    ref_NK, cand_NK = (np.argsort(-rows, axis=1, kind="stable")[:, :kept] for rows in (ref_NC, cand_NC))
    return np.asarray((ref_NK[:, :, None] == cand_NK[:, None, :]).any(axis=2).mean(axis=1), dtype=np.float64)
