"""The choice of a ridge by two halves of the images: the one whose fits to either half err least on the other. PURE.

The halves split no group of images that are alike, so a fit gains nothing from memorising its own photographs. The fit
itself decides what it shrinks and toward which weights: all of this project's shrink toward the dense layer.
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

    The shares are lost on the half of the fit and on the other one, each the mean of both ways round. The gap between
    them is over-fitting, about twice that of a fit to all images.

    `strength_whole`: for the fit to both halves. Twice the images weigh twice as much against the pull of the ridge, so
    half the strength does the same.
    """

    strength: float
    strength_whole: float
    share_fitted: float
    share_held_out: float


def ridges_from(least: float) -> tuple[float, ...]:
    """Return `least` and the strengths above it, weakest first."""
    return (least, *(each for each in RIDGES if each > least))


def choose_ridge(
    splits: tuple[Statistics, Statistics],
    strengths: Sequence[float],
    fit: Callable[[Statistics, float], Fit],
    share_lost: Callable[[Fit, Statistics], float],
) -> RidgeChoice:
    """Return the strength whose fits lose least on the half that they were not fitted to; ties go to the strongest.

    The strength for both halves together is never less than the weakest one.
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
