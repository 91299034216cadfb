"""Change points of a series that grows: which releases began a new level, looked for again after every release.

The change-point model of Hawkins, Qiu and Kang (Journal of Quality Technology 35, 2003): after each value every split
of the current level in two is tried by Student's t, the spread pooled over all levels, and the largest counts. A split
that counts closes the level; what follows is judged against its own. Before they are compared, t values of different
degrees of freedom are put on one scale (Wallace, Annals of Mathematical Statistics 30, 1959).

The bound is on the whole history, not on a look: `critical_score` is the score that a share `alpha` of simulated
histories of LOOKS values without a change ever reaches, at any of their looks. The simulated noise has Student tails of
TAIL degrees of freedom, heavier than any between repeated benches that were recorded.

Legend: H simulated histories, N values.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .stats import Floats, Interval

LEAST_VALUES = 5  # before as many there is nothing to tell noise from
LOOKS = 30  # the history that the error bound is for; of a longer level the newest LOOKS values are looked at
ALPHA = 0.025  # of a history without a change: below the 1 in 20 that is promised
LEAST_NOISE = 0.001  # between releases, of a logarithm: nothing that was benched twice agreed better
TAIL = 8
HISTORIES = 20_000
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A level that began at value `first` and was seen when value `found` came; both count from 0.

    `ratio`: the new level over the one before, by the values up to `found`. `score`: Student's t as a normal deviate.
    """

    first: int
    found: int
    ratio: Interval
    score: float

    @property
    def is_rise(self) -> bool:
        return self.ratio.value > 1


def normal_from_t(t: float, freedom: int) -> float:
    """The normal deviate about as rare as a t of so many degrees of freedom, with its sign."""
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(scale * math.sqrt(freedom * math.log1p(t * t / freedom)), t)


def change_points(
    values: Sequence[float] | Floats, critical: float, *, noise: float = LEAST_NOISE
) -> tuple[ChangePoint, ...]:
    """The changes of a series of positive values, as each was found; a value seen later alters none of them.

    Args:
        critical: the score that counts, see `critical_score`.
        noise: the spread of the logarithms that the estimate is never below, such as a measurement's own.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    points: list[ChangePoint] = []
    start, squares, freedom = 0, 0.0, 0
    for found in range(LEAST_VALUES - 1, len(logs)):
        level = logs[start : found + 1][-LOOKS:]
        if len(level) < 2 or freedom + len(level) - 2 < 1:
            continue
        at, ratio, score = _best_split(level, squares, freedom + len(level) - 2, noise)
        if abs(score) < critical:
            continue
        first = found + 1 - len(level) + at
        before = logs[start:first]
        squares, freedom = squares + _squares(before), freedom + len(before) - 1
        points.append(ChangePoint(first=first, found=found, ratio=ratio, score=score))
        start = first
    return tuple(points)


def _best_split(level: Floats, squares: float, freedom: int, noise: float) -> tuple[int, Interval, float]:
    """The split whose sides differ most for the spread within them: where, the new level over the old, the score."""
    after = np.arange(len(level) - 1, 0, -1)
    before = len(level) - after
    total = np.cumsum(level)
    step = (total[-1] - total[:-1]) / after - total[:-1] / before
    weight = 1 / before + 1 / after
    within = np.maximum(squares + _squares(level) - step**2 / weight, 0.0)
    error = np.sqrt(np.maximum(within / freedom, noise**2) * weight)
    at = int(np.argmax(np.abs(step / error)))
    value, reach = math.exp(step[at]), math.exp(_NORMAL_95 * error[at])
    ratio = Interval(value=value, low=value / reach, high=value * reach)
    return at + 1, ratio, normal_from_t(float(step[at] / error[at]), freedom)


def _squares(values: Floats) -> float:
    return float(np.sum((values - values.mean()) ** 2))


@functools.cache
def critical_score(alpha: float = ALPHA) -> float:
    """The score that a share `alpha` of histories of LOOKS values without a change reaches at some look."""
    highest_H = _highest_scores(np.random.default_rng(0).standard_t(TAIL, size=(HISTORIES, LOOKS)))
    return float(np.quantile(highest_H, 1 - alpha))


def _highest_scores(values_HN: Floats) -> Floats:
    """Of each history the largest score at any of its looks; the same sums as `_best_split`, all histories at once."""
    highest_H = np.zeros(len(values_HN))
    total_HN, squared_HN = np.cumsum(values_HN, axis=1), np.cumsum(values_HN**2, axis=1)
    for count in range(LEAST_VALUES, values_HN.shape[1] + 1):
        before_N = np.arange(1, count)
        after_N = count - before_N
        sum_H = total_HN[:, count - 1]
        step_HN = (sum_H[:, None] - total_HN[:, : count - 1]) / after_N - total_HN[:, : count - 1] / before_N
        gain_HN = step_HN**2 / (1 / before_N + 1 / after_N)
        whole_H = squared_HN[:, count - 1] - sum_H**2 / count
        gain_H, freedom = gain_HN.max(axis=1), count - 2
        t2_H = gain_H / (np.maximum(whole_H - gain_H, 1e-12) / freedom)
        scale = (8 * freedom + 1) / (8 * freedom + 3)
        highest_H = np.maximum(highest_H, scale * np.sqrt(freedom * np.log1p(t2_H / freedom)))
    return highest_H
