"""PURE: inputs on which two runtimes may choose otherwise, what they choose by being equal to rounding. N inputs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.records import Figure

from .rows import Bools, Floats

# Similarities of unit vectors that each err by e differ by up to 2 e, and so does what they are compared with.
SPREAD = 4.0
MOST_APART = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """Of the inputs of a link: `tied` have a choice whose margin is at most `margin`, and `apart` of those err more
    than rounding does, so that the two must have chosen otherwise: they are judged by `limit`, the largest share of
    them, and the measures are of the others. `worst` is the largest relative error of one that is apart.
    """

    inputs: int
    tied: int
    apart: int
    margin: Figure
    limit: Figure
    worst: Figure

    @property
    def share(self) -> float:
        return self.apart / self.inputs

    @property
    def holds(self) -> bool:
        return self.share <= self.limit

    def line(self, noun: str) -> str:
        """What a link says of it; empty where all chose alike."""
        if not self.apart:
            return ""
        sentence = (
            f"other tokens were merged on {self.apart} of {self.inputs} {noun} ({self.share:.1%}), whose similarities "
        )
        sentence += f"are equal to {self.margin:.1g}; they err by up to {self.worst:.2g} and are judged apart"
        return sentence if self.holds else f"{sentence}: more than {self.limit:.1%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The least margin [N] of each input's choices, and the largest share that may be chosen otherwise."""

    margins_N: Floats
    limit: float = MOST_APART

    def split_ties(self, errors_N: Floats, bound: float) -> tuple[Bools, Ties]:
        """Which inputs were chosen otherwise, by their relative errors against what rounding alone may do."""
        margin = SPREAD * bound
        tied_N = self.margins_N[: len(errors_N)] <= margin
        apart_N: NDArray[np.bool_] = tied_N & (errors_N > bound) & np.isfinite(errors_N)
        worst = float(errors_N[apart_N].max()) if apart_N.any() else 0.0
        ties = Ties(
            inputs=len(errors_N),
            tied=int(tied_N.sum()),
            apart=int(apart_N.sum()),
            margin=margin,
            limit=self.limit,
            worst=worst,
        )
        return apart_N, ties

    def stable_inputs(self, bound: float) -> NDArray[np.int64]:
        """Places of the inputs whose choices no rounding changes, in order."""
        return np.flatnonzero(self.margins_N > SPREAD * bound)
