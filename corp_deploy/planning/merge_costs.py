"""What a model costs by how many tokens each block merges away.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from corp_deploy.families.counting import counted
from corp_deploy.traced.models.merging import most_merged
from corp_deploy.traced.models.parts import macs_at_tokens

from .latency_of_tokens import stream_channels
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
        before = [0, *picks[:-1]]
        running = sum(self.running_LG[block, pick] for block, pick in enumerate(picks))
        merging = sum(self.merging_GG[came, pick] for came, pick in zip(before, picks, strict=True))
        return float(self.fixed + running + merging)


def merge_costs_in_macs(model: nn.Module, curves: MergeCurves) -> MergeCosts:
    """Multiply-adds of one input, counted for the model as it is and by formula at fewer tokens."""
    places, count = merge_places(model), counted(model)
    left = [curves.tokens - int(amount) for amount in curves.amounts_G]
    by_step = {name: macs_at_tokens(model, name, left) for place in places for name in place.behind}
    now = {name: macs_G[0] for name, macs_G in by_step.items()}
    running_LG = np.array([np.sum([by_step[name] for name in place.behind], axis=0) for place in places])
    channels = stream_channels(model)
    merging_GG = np.full((len(left), len(left)), np.inf)
    for one, tokens in enumerate(left):
        for other in range(one, len(left)):
            merged = tokens - left[other]
            if merged <= most_merged("merge", tokens, curves.protected):
                merging_GG[one, other] = merge_macs(tokens, curves.protected, merged, channels)
    return MergeCosts(fixed=float(count.macs - sum(now.values())), running_LG=running_LG, merging_GG=merging_GG)
