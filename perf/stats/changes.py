"""Change points of a growing series, searched again after every release.

This is the change-point model of Hawkins, Qiu and Kang (Journal of Quality Technology 35, 2003). Student's t tests each
split of the current level, with the spread pooled over all levels and t values on one scale (Wallace, Annals of
Mathematical Statistics 30, 1959).

`critical_score` bounds whole histories: a share `alpha` of simulated ones (Student noise with TAIL degrees of freedom)
reaches it at some look. Legend: H simulated histories, N values.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .stats import Floats, Interval

LEAST_VALUES = 5  # fewer values don't show the noise
LOOKS = 30  # length of the simulated histories; of a longer level only the newest LOOKS values are tested
ALPHA = 0.025  # false alarms per history; the documentation promises at most 1 in 20
LEAST_NOISE = 0.001  # of a logarithm between releases; no two benches of the same model agreed better
TAIL = 8
LEAST_SPREAD = 1e-6  # of simulated values, to avoid division by zero
HISTORIES = 20_000
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """A level that begins at value `first` and was detected at value `found`; `ratio` is to the level before it."""

    first: int
    found: int
    ratio: Interval
    score: float

    @property
    def is_rise(self) -> bool:
        return self.ratio.value > 1


def normal_from_t(t: Any, freedom: int) -> Any:
    """Return the normal deviate of about the same probability and sign as a t value, or as each of an array."""
    scale = (8 * freedom + 1) / (8 * freedom + 3)
    return np.copysign(scale * np.sqrt(freedom * np.log1p(t * t / freedom)), t)


def change_points(
    values: Sequence[float] | Floats, critical: float, *, noise: float = LEAST_NOISE
) -> tuple[ChangePoint, ...]:
    """Return the change points of a series of positive values in the order of detection.

    `critical` is that of `critical_score`, `noise` the smallest spread of the logarithms that is assumed.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    points: list[ChangePoint] = []
    start, squares, freedom = 0, 0.0, 0
    for found in range(LEAST_VALUES - 1, len(logs)):
        level = logs[start : found + 1][-LOOKS:]
        if len(level) < 2 or freedom + len(level) - 2 < 1:
            continue
        free = freedom + len(level) - 2
        (step,), (error,) = _split_steps(level[None], squares, free, noise)
        at = int(np.argmax(np.abs(step / error)))
        score = float(normal_from_t(step[at] / error[at], free))
        if abs(score) < critical:
            continue
        first = found + 2 - len(level) + at
        before = logs[start:first]
        squares, freedom = squares + float(_squared_deviations(before)), freedom + len(before) - 1
        value, reach = math.exp(step[at]), math.exp(_NORMAL_95 * error[at])
        ratio = Interval(value=value, low=value / reach, high=value * reach)
        points.append(ChangePoint(first=first, found=found, ratio=ratio, score=score))
        start = first
    return tuple(points)


def _split_steps(level_HN: Floats, squares: float, freedom: int, noise: float) -> tuple[Floats, Floats]:
    """Return, for each split of each level, the mean after it minus the mean before it, and its standard error."""
    after_N = np.arange(level_HN.shape[1] - 1, 0, -1)
    before_N = after_N[::-1]
    total_HN = np.cumsum(level_HN, axis=1)
    step_HN = (total_HN[:, -1:] - total_HN[:, :-1]) / after_N - total_HN[:, :-1] / before_N
    weight_N = 1 / before_N + 1 / after_N
    within_HN = squares + _squared_deviations(level_HN)[:, None] - step_HN**2 / weight_N
    return step_HN, np.sqrt(np.maximum(within_HN / freedom, noise**2) * weight_N)


def _squared_deviations(values: Floats) -> Floats:
    return np.asarray(np.sum((values - values.mean(axis=-1, keepdims=True)) ** 2, axis=-1))


@functools.cache
def critical_score(alpha: float = ALPHA) -> float:
    """Return the score that a share `alpha` of histories of LOOKS values without a change reaches at some look."""
    values_HN = np.random.default_rng(0).standard_t(TAIL, size=(HISTORIES, LOOKS))
    highest_H = np.zeros(HISTORIES)
    for count in range(LEAST_VALUES, LOOKS + 1):
        step_HN, error_HN = _split_steps(values_HN[:, :count], 0.0, count - 2, LEAST_SPREAD)
        highest_H = np.maximum(highest_H, normal_from_t(np.abs(step_HN / error_HN).max(axis=1), count - 2))
    return float(np.quantile(highest_H, 1 - alpha))
