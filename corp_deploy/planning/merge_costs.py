"""What a model costs by how many tokens each block merges away.

Legend: L blocks that can merge, G numbers of tokens merged so far.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
