"""Merging schedules: how many tokens each block merges away, by error (merge_curves.py) and cost.

Cost is multiply-adds, or the measured time of merges and of layers at fewer tokens. Merged tokens stay merged, so a
block that brings the number of merged tokens from R to R' adds the error e(R') - e(R), with e the block's own curve.
The best schedule for a given price on cost is a shortest path.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import count_macs
from corp_deploy.families.traced_model import tracing
from corp_deploy.spec.merging import most_merged
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.parts import macs_at_tokens
from corp_deploy.traced.models.token_merging import TokenMerge, Tokens, find_merges
from perf.bench.latency_table import LatencyTable

from .merge_curves import Array, MergeCurves, find_merge_places


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCosts:
    """The cost of a model by the tokens that it merges.

    `fixed` is the cost that doesn't depend on merging, `running_LG` that of the steps up to the next merge by the
    number of tokens merged so far, and `merging_GG` that of a merge by the numbers before and after it.
    """

    fixed: float
    running_LG: Array
    merging_GG: Array

    def of(self, picks: Sequence[int]) -> float:
        """Return the cost of a schedule, given by the position in G behind each block."""
        running = sum(running_G[pick] for running_G, pick in zip(self.running_LG, picks, strict=True))
        merging = sum(self.merging_GG[came, pick] for came, pick in pairwise([0, *picks]))
        return float(self.fixed + running + merging)


def cost_of_merges(curves: MergeCurves, cost: Callable[[int, int], float]) -> Array:
    """Return merging_GG, given a merge's cost by tokens and merged tokens; infinite where a merge is impossible."""
    merging_GG = np.full((len(curves.left), len(curves.left)), np.inf)
    for one, tokens in enumerate(curves.left):
        for other, after in enumerate(curves.left[one:], start=one):
            if tokens - after <= most_merged("merge", tokens, curves.protected):
                merging_GG[one, other] = cost(tokens, tokens - after)
    return merging_GG


def merge_costs_in_macs(model: nn.Module, curves: MergeCurves) -> MergeCosts:
    """Return the costs in multiply-adds of one input, counted for the present model and by formula at fewer tokens."""
    places, channels = find_merge_places(model), stream_channels(model)

    def macs_of_merge(tokens: int, count: int) -> int:
        free = tokens - curves.protected
        similarities, means = ((free + 1) // 2) * (free // 2) * channels, (free // 2) * count * channels
        return similarities + means if count else 0

    by_step = {name: macs_at_tokens(model, name, curves.left) for place in places for name in place.behind}
    return MergeCosts(
        fixed=float(count_macs(model).macs - sum(macs_G[0] for macs_G in by_step.values())),
        running_LG=np.array([np.sum([by_step[name] for name in place.behind], axis=0) for place in places]),
        merging_GG=cost_of_merges(curves, macs_of_merge),
    )


POINTS = 4  # numbers of tokens that a layer is measured at
MERGE = "merge of"


def pick_evenly(values: tuple[int, ...], points: int) -> tuple[int, ...]:
    """Return at most `points` of the values, evenly spaced by position, with both ends."""
    if len(values) <= points:
        return values
    picks = {round(place * (len(values) - 1) / (points - 1)) for place in range(points)}
    return tuple(values[pick] for pick in sorted(picks))


def stream_channels(model: nn.Module) -> int:
    """Return the number of channels of the stream whose tokens can be merged."""
    found = tracing(model).mergeable
    assert isinstance(found, Mergeable), found
    return found.channels


def interpolate_latency(tables: Mapping[int, LatencyTable], tokens: int, size: int, batch: int) -> float:
    """Return the milliseconds of a block whose site has width `size`, interpolated between measured token counts.

    It is 0 at width 0, where the block is a constant, and without tables, as for a site whose width can't change.
    """
    if not size or not tables:
        return 0.0
    measured = sorted(tables)
    return float(np.interp(tokens, measured, [tables[each].latency_ms(size, batch) for each in measured]))


class MergeAlone(nn.Module):
    """One token merge as a layer of a stream [B,N,C], to be timed alone.

    Tokens are compared by their own values, or dropped by their first channel. Token sizes are computed from the
    stream too, so that constant folding removes no part of the merge.
    """

    def __init__(self, merge: TokenMerge) -> None:
        super().__init__()
        self.merge = TokenMerge(count=merge.count, protected=merge.protected, how=merge.how, metric=merge.metric)

    def forward(self, x_BNC: Tensor) -> Tensor:
        first_BN = x_BNC[..., 0].abs() + 1.0
        if self.merge.how == "drop":
            return Tokens(*self.merge(x_BNC, None, None, first_BN)).x
        x, sizes, _ = self.merge(x_BNC, first_BN, None, x_BNC)
        # The sizes are an output too: the next attention reads them.
        return torch.as_tensor(x + 0.0 * sizes.unsqueeze(-1))


def merges_with_tokens(model: nn.Module) -> dict[str, tuple[TokenMerge, int]]:
    """Map the name of every merge of the model to the merge and the number of tokens that enter it."""
    tokens, merges = len(traced_model.token_kinds(model)), {}
    for name, merge in find_merges(model).items():
        merges[name] = merge, tokens
        tokens -= merge.count
    return merges


def merge_name(merge: TokenMerge, tokens: int, channels: int) -> str:
    """Return the name of a merge's latency table: count, tokens, channels, metric and protected tokens."""
    verb = f", by {merge.metric}" if merge.how == "merge" else ", dropped"
    return f"{MERGE} {merge.count} of {tokens} tokens of {channels} channels{verb}, {merge.protected} protected"


PRICES = 24  # bisection steps for the logarithm of the price, from a factor of 16


def _path(errors_LG: Array, costs: MergeCosts, price: float) -> list[int]:
    """Return, for each block, the position in G behind it, by the schedule of least error + price * cost."""
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
    """Tokens merged away in each block, the model's cost, and the predicted squared relative output error."""

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
    """Return the most tokens that one block of a schedule merges away.

    The curves merge a few tokens at a time and pair tokens anew each time; one large merge pairs once and loses more
    than they predict.
    """
    return max(8, tokens // 7)


def find_best_schedule(curves: MergeCurves, costs: MergeCosts, limit: float) -> Schedule | None:
    """Return the schedule of least predicted error that is optimal for a price on cost and costs at most `limit`.

    The result is None if no schedule costs so little. No block merges more than `most_at_once`.
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


def plain_shapes(blocks: int) -> list[list[float]]:
    """Return plain schedules as each block's share of the largest merge, those that merge latest first.

    They are: only the last two thirds of the blocks merge, equally; merges grow from zero; merges grow from half; all
    blocks merge equally.
    """
    growing = [block / max(1, blocks - 1) for block in range(blocks)]
    from_half = [0.5 + 0.5 * share for share in growing]
    return [[float(block >= blocks // 3) for block in range(blocks)], growing, from_half, [1.0] * blocks]


def _picks(curves: MergeCurves, shape: Sequence[float], most: float) -> list[int]:
    """Return the position in G behind each block of a schedule of this shape whose largest merge is `most`.

    A block merges fewer tokens if it can't merge that many.
    """
    last = len(curves.amounts_G) - 1
    between = int(curves.amounts_G[min(1, last)]) or 1
    picks, pick = [], 0
    for target in most * np.cumsum(shape):
        merged = int(curves.amounts_G[pick])
        reach = merged + most_merged("merge", curves.tokens - merged, curves.protected)
        pick = max(pick, min(round(float(target) / between), reach // between, last))
        picks.append(pick)
    return picks


def find_shaped_schedule(
    curves: MergeCurves, costs: MergeCosts, limit: float, shape: Sequence[float]
) -> Schedule | None:
    """Return the schedule of this shape that merges the fewest tokens at a cost of at most `limit`, or None."""
    before: list[int] | None = None
    for most in np.arange(0.0, curves.amounts_G[-1] + 1.0, 0.5):
        picks = _picks(curves, shape, float(most))
        if picks != before and costs.of(picks) <= limit:
            return _schedule(curves, costs, picks)
        before = picks
    return None
