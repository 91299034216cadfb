"""How many tokens each block should merge away: what it loses (merge_curves.py) against what it saves: multiply-adds,
or the time that layers at fewer tokens and merges take alone.

Tokens that are merged stay merged: a block that brings the count from R to R' adds e(R') - e(R), e being that block's
own curve, and later blocks, whose merging has less of the model before it, add less. The best schedule of such sums is
a shortest path, found for a price on cost.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import counted
from corp_deploy.families.traced_model import tracing
from corp_deploy.spec.merging import most_merged
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.parts import macs_at_tokens
from corp_deploy.traced.models.token_merging import TokenMerge, Tokens, find_merges
from perf.bench.latency_table import LatencyTable

from .merge_curves import Array, MergeCurves, merge_places


def merge_macs(tokens: int, protected: int, count: int, channels: int) -> int:
    """Multiply-adds of one merge: similarities of even and odd tokens, and the means."""
    free = tokens - protected
    return ((free + 1) // 2) * (free // 2) * channels + (free // 2) * count * channels if count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCosts:
    """What a model costs when merging: `fixed` whatever is merged, what runs up to the next place by how many tokens
    are merged then [L,G], and the merge itself by how many were and are merged [G,G].
    """

    fixed: float
    running_LG: Array
    merging_GG: Array

    def of(self, picks: Sequence[int]) -> float:
        """With these positions in G behind each block."""
        running = sum(running_G[pick] for running_G, pick in zip(self.running_LG, picks, strict=True))
        merging = sum(self.merging_GG[came, pick] for came, pick in pairwise([0, *picks]))
        return float(self.fixed + running + merging)


def of_merges(curves: MergeCurves, cost: Callable[[int, int], float]) -> Array:
    """By how many tokens were and are merged [G,G], each by tokens and how many go; infinite where no merge does so."""
    merging_GG = np.full((len(curves.left), len(curves.left)), np.inf)
    for one, tokens in enumerate(curves.left):
        for other, after in enumerate(curves.left[one:], start=one):
            if tokens - after <= most_merged("merge", tokens, curves.protected):
                merging_GG[one, other] = cost(tokens, tokens - after)
    return merging_GG


def merge_costs_in_macs(model: nn.Module, curves: MergeCurves) -> MergeCosts:
    """Multiply-adds of one input, counted for the model as it is and by formula at fewer tokens."""
    places, channels = merge_places(model), stream_channels(model)
    by_step = {name: macs_at_tokens(model, name, curves.left) for place in places for name in place.behind}
    return MergeCosts(
        fixed=float(counted(model).macs - sum(macs_G[0] for macs_G in by_step.values())),
        running_LG=np.array([np.sum([by_step[name] for name in place.behind], axis=0) for place in places]),
        merging_GG=of_merges(curves, lambda tokens, count: merge_macs(tokens, curves.protected, count, channels)),
    )


POINTS = 4
MERGE = "merge of"


def spread(values: tuple[int, ...], points: int) -> tuple[int, ...]:
    """At most so many of rising values, evenly, both ends included."""
    if len(values) <= points:
        return values
    picks = {round(place * (len(values) - 1) / (points - 1)) for place in range(points)}
    return tuple(values[pick] for pick in sorted(picks))


def stream_channels(model: nn.Module) -> int:
    """Of the stream whose tokens can be merged."""
    found = tracing(model).mergeable
    assert isinstance(found, Mergeable), found
    return found.channels


def latency_at(tables: Mapping[int, LatencyTable], tokens: int, size: int, batch: int) -> float:
    """Milliseconds of a layer at this size, straight between the numbers of tokens that it was measured at; nothing
    where a constant alone is left of it, or where it stays and wasn't measured.
    """
    if not size or not tables:
        return 0.0
    measured = sorted(tables)
    return float(np.interp(tokens, measured, [tables[each].latency_ms(size, batch) for each in measured]))


class MergeAlone(nn.Module):
    """One merge as a layer of a stream [B,N,C]: its tokens compared by themselves, or kept for their first channel.
    Sizes are of the stream too, so that no part of the merge is a constant.
    """

    def __init__(self, merge: TokenMerge) -> None:
        super().__init__()
        self.merge = TokenMerge(count=merge.count, protected=merge.protected, how=merge.how, metric=merge.metric)

    def forward(self, x_BNC: Tensor) -> Tensor:
        first_BN = x_BNC[..., 0].abs() + 1.0
        if self.merge.how == "drop":
            return Tokens(*self.merge(x_BNC, None, None, first_BN)).x
        x, sizes, _ = self.merge(x_BNC, first_BN, None, x_BNC)
        # The sizes go on to the next attention: they count.
        return torch.as_tensor(x + 0.0 * sizes.unsqueeze(-1))


def merges_of(model: nn.Module) -> dict[str, tuple[TokenMerge, int]]:
    """Every merge of the model by name, with the tokens that enter it."""
    tokens, merges = len(traced_model.token_kinds(model)), {}
    for name, merge in find_merges(model).items():
        merges[name] = merge, tokens
        tokens -= merge.count
    return merges


def merge_name(merge: TokenMerge, tokens: int, channels: int) -> str:
    """What the latency of a merge depends on."""
    verb = f", by {merge.metric}" if merge.how == "merge" else ", dropped"
    return f"{MERGE} {merge.count} of {tokens} tokens of {channels} channels{verb}, {merge.protected} protected"


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
