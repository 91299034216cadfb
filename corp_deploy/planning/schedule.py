"""How many tokens each block should merge away: what it loses (merge_curves.py) against what it saves (merge_costs.py).

Tokens that are merged stay merged: a block that brings the count from R to R' adds e(R') - e(R), e being that block's
own curve, and later blocks, whose merging has less of the model before it, add less. The best schedule of such sums is
a shortest path, found for a price on cost.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from corp_deploy.traced.models.merging import most_merged

from .merge_costs import MergeCosts
from .merge_curves import Array, MergeCurves

PRICES = 24  # halvings, of orders of magnitude, from a factor of 16


def _path(errors_LG: Array, costs: MergeCosts, price: float) -> list[int]:
    """The positions in G behind each block of least error plus price times cost."""
    best_G = np.full(errors_LG.shape[1], np.inf)
    best_G[0] = 0.0
    trail = []
    for error_G, running_G in zip(errors_LG, costs.running_LG, strict=True):
        added_GG = error_G[None, :] - error_G[:, None]
        total_GG = best_G[:, None] + added_GG + price * (costs.merging_GG + running_G[None, :])
        trail.append(total_GG.argmin(axis=0))
        best_G = total_GG.min(axis=0)
    picks = [int(best_G.argmin())]
    for came_G in reversed(trail[1:]):
        picks.insert(0, int(came_G[picks[0]]))
    return picks


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Tokens merged away in each block, what the model then costs, and the squared relative output error predicted."""

    counts: tuple[int, ...]
    cost: float
    error: float


def _schedule(curves: MergeCurves, costs: MergeCosts, picks: Sequence[int]) -> Schedule:
    counts, error = list[int](), 0.0
    for error_G, (came, pick) in zip(curves.errors_LG, pairwise([0, *picks]), strict=True):
        counts.append(int(curves.amounts_G[pick] - curves.amounts_G[came]))
        error += float(error_G[pick] - error_G[came])
    return Schedule(counts=tuple(counts), cost=costs.of(picks), error=error)


def most_at_once(tokens: int) -> int:
    """The most that one block merges away on a path: curves merge little by little, pairing tokens anew each time, and
    one merge of many, which pairs once, loses more than they say.
    """
    return max(8, tokens // 7)


def best_schedule(curves: MergeCurves, costs: MergeCosts, limit: float) -> Schedule | None:
    """The schedule of least predicted error among those that some price on cost asks for and that cost at most `limit`;
    None where none does. No block merges more at once than the curves are of (see `most_at_once`).
    """
    step_GG = curves.amounts_G[None, :] - curves.amounts_G[:, None]
    too_many_GG = step_GG > most_at_once(curves.tokens)
    costs = replace(costs, merging_GG=np.where(too_many_GG, np.inf, costs.merging_GG))
    low, high = 0.0, 1e-30
    while costs.of(_path(curves.errors_LG, costs, high)) > limit:
        low, high = high, high * 16.0
        if high > 1e30:
            return None
    for _ in range(PRICES):
        middle = (low * high) ** 0.5 if low > 0.0 else high / 16.0
        low, high = (low, middle) if costs.of(_path(curves.errors_LG, costs, middle)) <= limit else (middle, high)
        if high < 1e-30:
            break
    return _schedule(curves, costs, _path(curves.errors_LG, costs, high))


def shapes(blocks: int) -> list[list[float]]:
    """Shares of the most that a block merges away, the latest first: late, growing from none, from half, and alike."""
    growing = [block / max(1, blocks - 1) for block in range(blocks)]
    from_half = [0.5 + 0.5 * share for share in growing]
    return [[float(block >= blocks // 3) for block in range(blocks)], growing, from_half, [1.0] * blocks]


def _picks(curves: MergeCurves, shape: Sequence[float], most: float) -> list[int]:
    """Positions in G of the schedule of this shape; its largest block merges `most` away, each as many as it can."""
    last = len(curves.amounts_G) - 1
    between = int(curves.amounts_G[min(1, last)]) or 1
    picks, pick = [], 0
    for target in most * np.cumsum(shape):
        merged = int(curves.amounts_G[pick])
        reach = merged + most_merged("merge", curves.tokens - merged, curves.protected)
        pick = max(pick, min(round(float(target) / between), reach // between, last))
        picks.append(pick)
    return picks


def shaped_schedule(curves: MergeCurves, costs: MergeCosts, limit: float, shape: Sequence[float]) -> Schedule | None:
    """Of this shape the one that merges the fewest tokens for a cost of at most `limit`; None where there is none."""
    before: list[int] | None = None
    for most in np.arange(0.0, curves.amounts_G[-1] + 1.0, 0.5):
        picks = _picks(curves, shape, float(most))
        if picks != before and costs.of(picks) <= limit:
            return _schedule(curves, costs, picks)
        before = picks
    return None
