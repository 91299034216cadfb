"""Merge curves: the output error of merging tokens at every block, computed without labels.

Merging tokens and weighing them by their size equals replacing every source token, in a model that merges nothing, by
the mean of the tokens that it is merged with. So the error of merging at a block follows, to first order, from the
gradients of the outputs there (see curvature.py), for any number of merged tokens.

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

from .curvature import OutputGradients, output_gradients

Array = NDArray[np.float64]
TRIED = 16  # numbers of merged tokens whose error is computed; it is interpolated between them
AMOUNTS = 128  # about so many numbers of merged tokens a schedule may choose from
MOST = 0.95  # largest share of the tokens that is merged away


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlace:
    """A block that can merge tokens.

    `before` is the step in front of the merge and `protected` the number of tokens that never merge; `behind` are the
    steps up to the next merge, and `sites` the sites in them.
    """

    before: str
    protected: int
    behind: tuple[str, ...]
    sites: tuple[str, ...]


def find_merge_places(model: nn.Module) -> list[MergePlace]:
    """List the blocks of a model that can merge tokens; raise BadInput if there are none."""
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


def _lost(place: MergePlace, gradients: OutputGradients[str], amounts: Sequence[int]) -> list[float]:
    """Return the squared change of the outputs, to first order, if one block alone merges each number of tokens."""
    x_BNC = gradients.at[place.before]
    tokens, merged, lost = Tokens(x_BNC, None, sources_of(x_BNC)), 0, []
    for amount in amounts:
        merge = TokenMerge(count=amount - merged, protected=place.protected, how="merge")
        tokens, merged = Tokens(*merge(*tokens, tokens.x)), amount
        assert tokens.sources is not None, place
        lost.append(gradients.energy_of_change(place.before, unmerge_tokens(tokens.x, tokens.sources) - x_BNC))
    return lost


def amounts_tried(tokens: int, protected: int) -> list[int]:
    """Return the ascending numbers of merged tokens at which errors are computed; one merge leads to the next."""
    step = max(1, round(MOST * (tokens - protected) / TRIED))
    amounts, merged = [], 0
    while merged + step <= MOST * (tokens - protected) and step <= most_merged("merge", tokens - merged, protected):
        merged += step
        amounts.append(merged)
    return amounts


def amounts_offered(tokens: int, most: int) -> NDArray[np.int64]:
    """Return the numbers of merged tokens that a schedule may choose from [G], about AMOUNTS evenly spaced ones."""
    return np.arange(0, most + 1, max(1, tokens // AMOUNTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCurves:
    """Squared relative output errors [L,G] of the numbers of tokens [G] that are merged away behind each block."""

    tokens: int
    protected: int
    amounts_G: NDArray[np.int64]
    errors_LG: Array

    @property
    def left(self) -> list[int]:
        """The numbers of tokens that remain [G]."""
        return [self.tokens - int(amount) for amount in self.amounts_G]


def compute_merge_curves(model: nn.Module, inputs: Inputs) -> MergeCurves:
    """Compute the curves by a few forward and backward passes, and merges of every block's tokens."""
    places, tokens = find_merge_places(model), len(traced_model.token_kinds(model))
    protected = places[0].protected
    amounts = amounts_tried(tokens, protected)
    lost_LT, energy = np.zeros((len(places), len(amounts))), 0.0
    with torch.inference_mode(False), evaluating(model):
        for gradients in output_gradients(model, inputs):
            energy += gradients.energy
            with torch.no_grad():
                lost_LT += np.array([_lost(place, gradients, amounts) for place in places])
    amounts_G = amounts_offered(tokens, amounts[-1] if amounts else 0)
    errors = [np.interp(amounts_G, [0, *amounts], [0.0, *lost_T]) for lost_T in lost_LT / energy]
    # The true error rises with the number of merged tokens; the estimate may not.
    return MergeCurves(
        tokens=tokens,
        protected=protected,
        amounts_G=amounts_G,
        errors_LG=np.maximum.accumulate(np.array(errors), axis=1),
    )
