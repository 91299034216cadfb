"""PURE: feature maps as rows of tokens: [N,T,C] as they are, [N,C,H,W] a row for each place. N inputs, R tokens of all
of them, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rows import Bools, Floats, ratio
from .similarity import drawn_rows, linear_cka, same_neighbour

LOW_QUANTILE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """Cosine of each token with the reference's: its mean and 1 % quantile; of at most 1,024 tokens drawn among all,
    the share whose nearest other is the reference's, and linear CKA (debiased).
    """

    cosine_mean: float
    cosine_q01: float
    compared: int
    neighbour_agreement: float | None
    linear_cka: float | None


def _tokens(features: NDArray[np.floating]) -> NDArray[np.floating] | None:
    """A row for each token, or None where the shape has none."""
    if features.ndim == 3:
        return features.reshape(-1, features.shape[-1])
    if features.ndim == 4:
        return np.moveaxis(features, 1, -1).reshape(-1, features.shape[1])
    return None


def token_figures(
    reference: NDArray[np.floating], candidate: NDArray[np.floating], finite_N: Bools
) -> TokenFigures | None:
    """None for feature maps that have no tokens. A token of an input that isn't finite has a cosine of 0 and no
    neighbour.
    """
    ours_RC, theirs_RC = _tokens(reference), _tokens(candidate)
    if ours_RC is None or theirs_RC is None:
        return None
    finite_R = np.repeat(finite_N, len(ours_RC) // len(finite_N))
    chosen = drawn_rows(len(ours_RC))
    finite_P, ours_PC = finite_R[chosen], ours_RC[chosen].astype(np.float64)
    theirs_PC: Floats = np.where(finite_P[:, None], theirs_RC[chosen], 0.0).astype(np.float64)
    cosines_R = np.where(finite_R, _cosines(ours_RC, theirs_RC), 0.0)
    agrees_P = same_neighbour(ours_PC, theirs_PC, finite_P)
    return TokenFigures(
        cosine_mean=float(cosines_R.mean()),
        cosine_q01=float(np.quantile(cosines_R, LOW_QUANTILE)),
        compared=len(chosen),
        neighbour_agreement=None if agrees_P is None else float(agrees_P.mean()),
        linear_cka=linear_cka(ours_PC, theirs_PC),
    )


def _cosines(ours_RC: NDArray[np.floating], theirs_RC: NDArray[np.floating]) -> Floats:
    """A token at a time, in float64; 1 where both are zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        products_R = np.einsum("rc,rc->r", ours_RC, theirs_RC, dtype=np.float64)
        squares_R = [np.einsum("rc,rc->r", rows, rows, dtype=np.float64) for rows in (ours_RC, theirs_RC)]
    norms_R = np.sqrt(squares_R[0]) * np.sqrt(squares_R[1])
    return np.where(np.isfinite(norms_R), ratio(products_R, norms_R, at_zero=1.0), 0.0)
