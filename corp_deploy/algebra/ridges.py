"""The choice of a ridge by two halves of the images: the one whose fits to either half err least on the other. PURE.

The caller has to put similar images into the same half: memorising one half then doesn't lower the error on the other.
The caller's fit decides what the ridge pulls toward: in this project, the weights of the dense layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

RIDGES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Statistics = TypeVar("Statistics")
Fit = TypeVar("Fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class RidgeChoice:
    """A strength for fits to half of the images, and the shares of the dense signal that such fits lose.

    `share_fitted` is the share lost on the half of the fit, `share_held_out` that on the other half, each the mean over
    the fits to either half. The gap between them is over-fitting, about twice that of a fit to all images.

    `strength_whole` is the strength for the fit to all images. It is half of `strength`: a ridge is relative to the
    mean over images, so half of it is the same pull against the sum over twice as many.
    """

    strength: float
    strength_whole: float
    share_fitted: float
    share_held_out: float


def ridges_from(least: float) -> tuple[float, ...]:
    """Return `least` and the strengths of RIDGES above it, weakest first."""
    return (least, *(each for each in RIDGES if each > least))


def choose_ridge(
    splits: tuple[Statistics, Statistics],
    strengths: Sequence[float],
    fit: Callable[[Statistics, float], Fit],
    share_lost: Callable[[Fit, Statistics], float],
) -> RidgeChoice:
    """Choose the strength whose fits lose least on the half that they were not fitted to; ties go to the strongest.

    `strength_whole` is never less than the weakest of `strengths`.
    """
    assert len(strengths) > 0
    ways = (splits, splits[::-1])

    def held_out(strength: float) -> float:
        return sum(share_lost(fit(own, strength), other) for own, other in ways)

    strength = min(sorted(strengths, reverse=True), key=held_out)
    fits = [(fit(own, strength), own, other) for own, other in ways]
    return RidgeChoice(
        strength=strength,
        strength_whole=max(0.5 * strength, min(strengths)),
        share_fitted=fmean(share_lost(here, own) for here, own, _ in fits),
        share_held_out=fmean(share_lost(here, other) for here, _, other in fits),
    )
