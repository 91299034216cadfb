"""What a model costs by how many tokens each block merges away, in multiply-adds; in time, which numbers of tokens a
layer is timed at, and a merge as a layer alone.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.counting import counted
from corp_deploy.families.traced_model import tracing
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.merging import most_merged
from corp_deploy.traced.models.parts import macs_at_tokens
from corp_deploy.traced.models.token_merging import TokenMerge, Tokens, merges_in
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
    for name, merge in merges_in(model).items():
        merges[name] = merge, tokens
        tokens -= merge.count
    return merges


def merge_name(merge: TokenMerge, tokens: int, channels: int) -> str:
    """What the latency of a merge depends on."""
    verb = f", by {merge.metric}" if merge.how == "merge" else ", dropped"
    return f"{MERGE} {merge.count} of {tokens} tokens of {channels} channels{verb}, {merge.protected} protected"
