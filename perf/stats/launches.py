"""The variance of a speed-up between launches beside the variance within one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from .stats import DEFAULT_CONFIDENCE, Rounds, ratio_of_medians, z_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpread:
    """The speed-up of each launch, and two relative standard deviations.

    `between_rel` is that of the speed-ups, and `within_rel` the one to expect from the rounds of a launch alone, None
    for too few rounds.
    """

    speedups: tuple[float, ...]
    between_rel: float
    within_rel: float | None

    @property
    def sentence(self) -> str:
        each = ", ".join(f"{speedup:.3f}" for speedup in self.speedups)
        within = "too few rounds to know it" if self.within_rel is None else f"{100 * self.within_rel:.2g} %"
        spread = f"standard deviation between launches {100 * self.between_rel:.2g} %, within one {within}"
        return f"speed-up of {len(self.speedups)} launches: {each} ({spread})"


def spread_of_launches(slow: Rounds, fast: Rounds, launches: Sequence[int]) -> LaunchSpread | None:
    """Compare the launches of rounds of two subjects, the reference first; None for fewer than two."""
    if len(names := sorted({*launches})) < 2:
        return None
    every = [[index for index, launch in enumerate(launches) if launch == name] for name in names]
    speedups = [ratio_of_medians([slow[i] for i in own], [fast[i] for i in own]) for own in every]
    within = [speedup.half_width_rel / z_of(DEFAULT_CONFIDENCE) for speedup in speedups]
    return LaunchSpread(
        speedups=tuple(speedup.value for speedup in speedups),
        between_rel=float(np.std(np.log([speedup.value for speedup in speedups]), ddof=1)),
        within_rel=math.sqrt(fmean(rel**2 for rel in within)) if all(map(math.isfinite, within)) else None,
    )
