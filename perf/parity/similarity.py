"""PURE: nearest neighbours and linear CKA of two representations. R rows, F features of each."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rows import Bools, Floats, safe_ratios

LEAST_ROWS = 3  # of two rows, each is the nearest neighbour of the other
LEAST_FOR_CKA = 4  # the unbiased estimate divides by R - 3
# Cosines that differ by less count as equal, as in float32.
TIE = 1e-6
CHUNK = 512  # rows of the matrix of cosines in memory at a time
SEED = 0
MOST_DRAWN = 1024  # rows for which all pairs are compared


def draw_rows(count: int) -> NDArray[np.intp]:
    """Return the ascending indices of all rows, or of MOST_DRAWN rows drawn with a fixed seed."""
    if count <= MOST_DRAWN:
        return np.arange(count)
    return np.sort(np.random.default_rng(SEED).choice(count, MOST_DRAWN, replace=False))


def same_neighbour(reference_RF: Floats, candidate_RF: Floats, usable_R: Bools) -> Bools | None:
    """Return whether each row's nearest neighbour by cosine is one in the reference too; None for fewer than 3 rows."""
    count = len(usable_R)
    if count < LEAST_ROWS:
        return None
    ours_RF, theirs_RF = _unit(reference_RF), _unit(candidate_RF)
    agrees_R = np.zeros(count, dtype=np.bool_)
    for start in range(0, count, CHUNK):
        chunk = np.arange(start, min(start + CHUNK, count))
        theirs_PR = _cosines(theirs_RF, chunk)
        theirs_PR[:, ~usable_R] = -np.inf
        ours_PR = _cosines(ours_RF, chunk)
        own = np.take_along_axis(ours_PR, theirs_PR.argmax(axis=1)[:, None], axis=1)[:, 0]
        agrees_R[chunk] = own >= ours_PR.max(axis=1) - TIE
    return agrees_R & usable_R


def linear_cka(reference_RF: Floats, candidate_RF: Floats) -> float | None:
    """Return debiased linear CKA (Kornblith et al., arXiv 1905.00414; HSIC by Song et al., JMLR 13, 2012, eq. 5).

    Returns None for fewer than 4 rows, and if a side hardly varies.
    """
    if len(reference_RF) < LEAST_FOR_CKA:
        return None
    # Centring does not change the estimate but reduces rounding errors.
    centred = (rows_RF - rows_RF.mean(axis=0) for rows_RF in (reference_RF, candidate_RF))
    ours_RR, theirs_RR = (rows_RF @ rows_RF.T for rows_RF in centred)
    own, other = _unbiased_hsic(ours_RR, ours_RR), _unbiased_hsic(theirs_RR, theirs_RR)
    if not (own > 0 and other > 0):
        return None
    return float(_unbiased_hsic(ours_RR, theirs_RR) / np.sqrt(own * other))


def _unbiased_hsic(kernel_RR: Floats, other_RR: Floats) -> float:
    count = len(kernel_RR)
    first_RR, second_RR = (kernel - np.diag(np.diag(kernel)) for kernel in (kernel_RR, other_RR))
    traces = (first_RR * second_RR).sum()
    sums = first_RR.sum() * second_RR.sum() / ((count - 1) * (count - 2))
    mixed = 2.0 * (first_RR.sum(axis=0) * second_RR.sum(axis=0)).sum() / (count - 2)
    return float((traces + sums - mixed) / (count * (count - 3)))


def _cosines(unit_RF: Floats, chunk: NDArray[np.integer]) -> Floats:
    cosines_PR: Floats = unit_RF[chunk] @ unit_RF.T
    cosines_PR[np.arange(len(chunk)), chunk] = -np.inf
    return cosines_PR


def _unit(rows_RF: Floats) -> Floats:
    norms_R1 = np.linalg.norm(rows_RF, axis=1, keepdims=True)
    return np.asarray(rows_RF / np.where(norms_R1 > 0, norms_R1, 1.0), dtype=np.float64)


LOW_QUANTILE = 0.01


def _tokens(features: NDArray[np.floating]) -> NDArray[np.floating] | None:
    if features.ndim == 3:
        return features.reshape(-1, features.shape[-1])
    if features.ndim == 4:
        return np.moveaxis(features, 1, -1).reshape(-1, features.shape[1])
    return None


def token_figures(reference: NDArray[np.floating], candidate: NDArray[np.floating], finite_N: Bools) -> dict[str, Any]:
    """Return token figures by field of FeatureMapMeasures, {} without tokens; non-finite tokens have cosine 0."""
    ours_RC, theirs_RC = _tokens(reference), _tokens(candidate)
    if ours_RC is None or theirs_RC is None:
        return {}
    finite_R = np.repeat(finite_N, len(ours_RC) // len(finite_N))
    chosen = draw_rows(len(ours_RC))
    finite_P, ours_PC = finite_R[chosen], ours_RC[chosen].astype(np.float64)
    theirs_PC: Floats = np.where(finite_P[:, None], theirs_RC[chosen], 0.0).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products_R, *squares_R = (
            np.einsum("rc,rc->r", *pair, dtype=np.float64)
            for pair in ((ours_RC, theirs_RC), (ours_RC, ours_RC), (theirs_RC, theirs_RC))
        )
    norms_R = np.sqrt(squares_R[0]) * np.sqrt(squares_R[1])
    cosines_R = np.where(finite_R & np.isfinite(norms_R), safe_ratios(products_R, norms_R, at_zero=1.0), 0.0)
    agrees_P = same_neighbour(ours_PC, theirs_PC, finite_P)
    return {
        "token_cosine_mean": float(cosines_R.mean()),
        "token_cosine_q01": float(np.quantile(cosines_R, LOW_QUANTILE)),
        "tokens_compared": len(chosen),
        "neighbour_agreement": None if agrees_P is None else float(agrees_P.mean()),
        "linear_cka": linear_cka(ours_PC, theirs_PC),
    }
