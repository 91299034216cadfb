"""How many tokens each block should merge away: what it loses, learned without labels, against what it saves.

Merging tokens and weighing them by their size is the same as giving every source token the mean of those it is merged
with, in a model that merges nothing. So what merging loses at a block follows, to first order, from the gradients of
the outputs there (see curvature.py), for any number of tokens at once. Tokens that are merged stay merged: a block that
brings the count from R to R' adds e(R') - e(R), e being that block's own curve, and later blocks, whose merging has
less of the model before it, add less. The best schedule of such sums is a shortest path, found for a price on cost.

Legend: L blocks that can merge, G numbers of tokens merged so far, B images, N tokens, C channels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.hooks import evaluating
from calib.inputs import Inputs
from corp_deploy.families.family import family_of, sites_of
from corp_deploy.families.merging import Merging, most_merged
from corp_deploy.families.model_cost import counted
from corp_deploy.families.steps import Branch, Merge
from corp_deploy.families.token_merging import TokenMerge, Tokens, sources_of, unmerged

from .curvature import Tangent, tangents

Array = NDArray[np.float64]
TRIED = 16  # amounts of merging whose loss is learned; between them it is interpolated
STEP = 4  # tokens between two amounts that a schedule may have
MOST = 0.95  # of the tokens are merged away at most
PRICES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlace:
    """Where a block merges: the branch before it, the tokens protected, the branches up to the next place."""

    before: str
    protected: int
    behind: tuple[str, ...]


def merge_places(model: nn.Module) -> list[MergePlace]:
    """Of every block, as a copy that merges has them. Raises BadInput for a model that can't merge tokens."""
    family = family_of(model)
    steps = list(family.steps(family.with_merging(model, Merging(schedule=(1,) * family.depth(model)))))
    at = [place for place, step in enumerate(steps) if isinstance(step, Merge)]
    places = []
    for place, following in zip(at, [*at[1:], len(steps)], strict=True):
        before, merge = steps[place - 1], steps[place]
        assert isinstance(before, Branch), before
        assert isinstance(merge, Merge), merge
        behind = tuple(step.name for step in steps[place + 1 : following] if isinstance(step, Branch))
        places.append(MergePlace(before=before.name, protected=merge.merge.protected, behind=behind))
    return places


def _lost(place: MergePlace, tangent: Tangent, amounts: Sequence[int]) -> list[float]:
    """Squared change of the outputs of a piece, to first order, with so many tokens merged at one place alone."""
    x_BNC = tangent.behind[place.before]
    tokens, merged, lost = Tokens(x_BNC, None, sources_of(x_BNC)), 0, []
    for amount in amounts:
        merge = TokenMerge(count=amount - merged, protected=place.protected, how="merge")
        tokens, merged = Tokens(*merge(*tokens, tokens.x)), amount
        assert tokens.sources is not None, place
        lost.append(tangent.energy_of_change(place.before, unmerged(tokens.x, tokens.sources) - x_BNC))
    return lost


def amounts_tried(tokens: int, protected: int) -> list[int]:
    """Ascending, each within what one merge can take from the one before."""
    step = max(1, round(MOST * (tokens - protected) / TRIED))
    amounts, merged = [], 0
    while merged + step <= MOST * (tokens - protected) and step <= most_merged("merge", tokens - merged, protected):
        merged += step
        amounts.append(merged)
    return amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCurves:
    """What merging loses of the outputs [L,G], squared and relative, by how many tokens are merged away [G] when a
    block is done.
    """

    tokens: int
    protected: int
    amounts_G: NDArray[np.int64]
    errors_LG: Array


def merge_curves(model: nn.Module, inputs: Inputs) -> MergeCurves:
    """By a few forward and backward passes over the inputs, and a few merges of every block's tokens."""
    places, tokens = merge_places(model), len(family_of(model).token_kinds(model))
    protected = places[0].protected
    tried = amounts_tried(tokens, protected)
    lost_LT, energy = np.zeros((len(places), len(tried))), 0.0
    with torch.inference_mode(False), evaluating(model):
        for tangent in tangents(model, inputs):
            energy += tangent.energy
            with torch.no_grad():
                lost_LT += np.array([_lost(place, tangent, tried) for place in places])
    amounts_G = np.arange(0, (tried[-1] if tried else 0) + 1, STEP)
    errors = [np.interp(amounts_G, [0, *tried], [0.0, *lost_T]) for lost_T in lost_LT / energy]
    # More tokens merged never lose less; the estimate may wobble.
    return MergeCurves(
        tokens=tokens,
        protected=protected,
        amounts_G=amounts_G,
        errors_LG=np.maximum.accumulate(np.array(errors), axis=1),
    )


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
        before = [0, *picks[:-1]]
        running = sum(self.running_LG[block, pick] for block, pick in enumerate(picks))
        merging = sum(self.merging_GG[came, pick] for came, pick in zip(before, picks, strict=True))
        return float(self.fixed + running + merging)


def _running_macs(model: nn.Module, names: Sequence[str], tokens: int, now: Mapping[str, int], dense: int) -> float:
    """Of branches at so many tokens: their sites' formulas, by share of the dense count where there is none."""
    sites = sites_of(model).by_name
    return float(
        sum(
            sites[name].macs(sites[name].width, sites[name].as_json().get("geometry", "ragged"), tokens)
            if name in sites
            else now[name] * tokens / dense
            for name in names
        )
    )


def merge_costs_in_macs(model: nn.Module, curves: MergeCurves) -> MergeCosts:
    """Multiply-adds of one input, counted for the model as it is and by formula at fewer tokens."""
    places, count = merge_places(model), counted(model)
    now = {name: count.within(name) for place in places for name in place.behind}
    left = [curves.tokens - int(amount) for amount in curves.amounts_G]
    running_LG = np.array(
        [[_running_macs(model, place.behind, n, now, curves.tokens) for n in left] for place in places]
    )
    channels = sites_of(model).every[0].first.in_features
    merging_GG = np.full((len(left), len(left)), np.inf)
    for one, tokens in enumerate(left):
        for other in range(one, len(left)):
            merged = tokens - left[other]
            if merged <= most_merged("merge", tokens, curves.protected):
                merging_GG[one, other] = merge_macs(tokens, curves.protected, merged, channels)
    return MergeCosts(fixed=float(count.macs - sum(now.values())), running_LG=running_LG, merging_GG=merging_GG)


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
    amounts = [0, *(int(curves.amounts_G[pick]) for pick in picks)]
    before = [0, *picks[:-1]]
    error = sum(
        curves.errors_LG[block, pick] - curves.errors_LG[block, came]
        for block, (came, pick) in enumerate(zip(before, picks, strict=True))
    )
    counts = tuple(later - earlier for earlier, later in pairwise(amounts))
    return Schedule(counts=counts, cost=costs.of(picks), error=float(error))


def most_at_once(tokens: int) -> int:
    """The most that one block merges away on a path: curves merge little by little, pairing tokens anew each time, and
    one merge of many, which pairs once, loses more than they say.
    """
    return max(2 * STEP, tokens // 7)


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
    """Plain schedules, as shares of the most tokens that a block merges away: alike in each block, growing from none,
    and none in the first third.
    """
    growing = [block / max(1, blocks - 1) for block in range(blocks)]
    return [[1.0] * blocks, growing, [float(block >= blocks // 3) for block in range(blocks)]]


def shaped_schedule(curves: MergeCurves, costs: MergeCosts, limit: float, shape: Sequence[float]) -> Schedule | None:
    """The schedule of this shape that merges the fewest tokens with which a model costs at most `limit`; None where
    there is none.
    """
    so_far, last = np.cumsum(shape), len(curves.amounts_G) - 1
    before: list[int] | None = None
    for most in np.arange(0.0, curves.amounts_G[-1] / max(shape) + 1.0, 0.5):
        picks = [round(float(most * each) / STEP) for each in so_far]
        if picks[-1] > last:
            return None
        if picks != before and costs.of(picks) <= limit:
            return _schedule(curves, costs, picks)
        before = picks
    return None
