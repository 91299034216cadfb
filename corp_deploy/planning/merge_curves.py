"""What merging tokens loses at every block, learned without labels.

Merging tokens and weighing them by their size is the same as giving every source token the mean of those it is merged
with, in a model that merges nothing. So what merging loses at a block follows, to first order, from the gradients of
the outputs there (see curvature.py), for any number of tokens at once.

Legend: L blocks that can merge, G numbers of tokens merged so far, B images, N tokens, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calib.inputs import Inputs
from calib.sites import evaluating
from corp_deploy.families import traced_model
from corp_deploy.spec.merging import Merging, most_merged
from corp_deploy.traced.models.steps import Merge, SegmentStep, Unmerge
from corp_deploy.traced.models.token_merging import TokenMerge, Tokens, sources_of, unmerge_tokens

from .curvature import Tangent, tangents

Array = NDArray[np.float64]
TRIED = 16  # amounts of merging whose loss is learned; between them it is interpolated
AMOUNTS = 128  # about as many a schedule may choose among
MOST = 0.95  # of the tokens are merged away at most


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlace:
    """The step before a merge, tokens protected, steps of fewer tokens up to the next place and the `sites` in them."""

    before: str
    protected: int
    behind: tuple[str, ...]
    sites: tuple[str, ...]


def merge_places(model: nn.Module) -> list[MergePlace]:
    """Of every block, as a copy that merges has them. Raises BadInput for a model that can't merge tokens."""
    one_each = Merging(schedule=(1,) * traced_model.depth(model))
    steps = list(traced_model.steps(traced_model.with_merging(model, one_each)))
    at = [place for place, step in enumerate(steps) if isinstance(step, Merge)]
    end = next((place for place, step in enumerate(steps) if isinstance(step, Unmerge)), len(steps))
    places = []
    for place, following in zip(at, [*at[1:], end], strict=True):
        before, merge = steps[place - 1], steps[place]
        assert isinstance(merge, Merge), merge
        behind = [step for step in steps[place + 1 : following] if isinstance(step, SegmentStep)]
        places.append(
            MergePlace(
                before=before.name,
                protected=merge.merge.protected,
                behind=tuple(step.name for step in behind),
                sites=tuple(name for step in behind for name in step.sites),
            )
        )
    return places


def _lost(place: MergePlace, tangent: Tangent[str], amounts: Sequence[int]) -> list[float]:
    """Squared change of the outputs of a piece, to first order, with so many tokens merged at one place alone."""
    x_BNC = tangent.at[place.before]
    tokens, merged, lost = Tokens(x_BNC, None, sources_of(x_BNC)), 0, []
    for amount in amounts:
        merge = TokenMerge(count=amount - merged, protected=place.protected, how="merge")
        tokens, merged = Tokens(*merge(*tokens, tokens.x)), amount
        assert tokens.sources is not None, place
        lost.append(tangent.energy_of_change(place.before, unmerge_tokens(tokens.x, tokens.sources) - x_BNC))
    return lost


def amounts_tried(tokens: int, protected: int) -> list[int]:
    """Ascending, each within what one merge can take from the one before."""
    step = max(1, round(MOST * (tokens - protected) / TRIED))
    amounts, merged = [], 0
    while merged + step <= MOST * (tokens - protected) and step <= most_merged("merge", tokens - merged, protected):
        merged += step
        amounts.append(merged)
    return amounts


def amounts_offered(tokens: int, most: int) -> NDArray[np.int64]:
    """What a schedule may have merged away behind a block [G]: each number of few tokens, every so many of many."""
    return np.arange(0, most + 1, max(1, tokens // AMOUNTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCurves:
    """What merging loses of the outputs [L,G], squared and relative, by how many tokens are gone [G] behind a block."""

    tokens: int
    protected: int
    amounts_G: NDArray[np.int64]
    errors_LG: Array

    @property
    def left(self) -> list[int]:
        """The tokens that are left [G]."""
        return [self.tokens - int(amount) for amount in self.amounts_G]


def merge_curves(model: nn.Module, inputs: Inputs) -> MergeCurves:
    """By a few forward and backward passes over the inputs, and a few merges of every block's tokens."""
    places, tokens = merge_places(model), len(traced_model.token_kinds(model))
    protected = places[0].protected
    amounts = amounts_tried(tokens, protected)
    lost_LT, energy = np.zeros((len(places), len(amounts))), 0.0
    with torch.inference_mode(False), evaluating(model):
        for tangent in tangents(model, inputs):
            energy += tangent.energy
            with torch.no_grad():
                lost_LT += np.array([_lost(place, tangent, amounts) for place in places])
    amounts_G = amounts_offered(tokens, amounts[-1] if amounts else 0)
    errors = [np.interp(amounts_G, [0, *amounts], [0.0, *lost_T]) for lost_T in lost_LT / energy]
    # More tokens merged never lose less; the estimate may wobble.
    return MergeCurves(
        tokens=tokens,
        protected=protected,
        amounts_G=amounts_G,
        errors_LG=np.maximum.accumulate(np.array(errors), axis=1),
    )
