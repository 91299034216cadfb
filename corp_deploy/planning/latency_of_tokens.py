"""What fewer tokens cost in time: which numbers of them a layer is timed at, and a merge of tokens as a layer alone."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import tracing
from corp_deploy.traced.models.mergeable import Mergeable
from corp_deploy.traced.models.token_merging import TokenMerge, Tokens, merges_in
from perf.bench.latency_table import LatencyTable

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
