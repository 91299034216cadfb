"""The probe split of a budget: images that error curves are measured on, and moments of all others, so none is fitted.

A fit to few images promises more than it keeps, an MLP's more than that of queries and keys, so that curves measured on
its own images would spare the wrong sites. Moments are sums: those of the images looked at are taken out again.
"""

from dataclasses import dataclass, replace

import torch

from calib.combination import moments_without
from calib.inputs import Inputs, InputSet, to_device
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.reduction.calibrate import as_taken, calibrate
from corp_deploy.reduction.moments import merging_note
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import merging_of_moments
from corp_deploy.traced.models.module import device_of

IMAGES = 32
IN_LOOP = 96
ALL_BELOW = 16
FEW = 16
RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSplit:
    """Inputs to look at, moments without them, and the others (all where all are looked at)."""

    inputs: Inputs
    moments: Moments
    others: InputSet

    @property
    def few(self) -> InputSet:
        """What a closed loop is tried on."""
        return self.others.subset(_spread(self.others.count, IN_LOOP))


def _positions(count: int) -> list[int]:
    """At most IMAGES, and a quarter of them all at most, in a few runs: neighbours are often cut from one picture."""
    run = max(min(IMAGES, count // 4) // RUNS, 1)
    return sorted({start * count // RUNS + place for start in range(RUNS) for place in range(run)})


def _of_groups(images: InputSet, moments: Moments) -> list[int]:
    """The positions of whole groups, at least as many images as otherwise, drawn evenly from the groups."""
    group_of = dict(zip(moments.image_ids.tolist(), moments.group_ids.tolist(), strict=True))
    groups = [group_of.get(image) for image in images.ids.tolist()]
    names = list(dict.fromkeys(group for group in groups if group is not None))
    target_count = min(IMAGES, images.count // 4)
    chosen: set[int] = set()
    # Every so many groups, then those next to them, until there are images enough.
    for name in sorted(names, key=lambda each: (names.index(each) % RUNS, names.index(each))):
        if sum(group in chosen for group in groups) >= target_count or len(chosen) + 1 >= len(names):
            break
        chosen.add(name)
    return [place for place, group in enumerate(groups) if group in chosen]


def _as_calibrated(dense: Checkpoint, moments: Moments) -> Checkpoint:
    """The model with tokens merged as when the moments were taken: only sums over the same tokens can be taken off."""
    if not merging_note(dense.model, moments):
        return dense
    return replace(dense, model=traced_model.with_merging(dense.model, merging_of_moments(moments.lineage)))


def _left(dense: Checkpoint, moments: Moments, chosen: InputSet) -> Moments:
    """The moments without these images, and their half without those of them that are in it."""
    where, half = device_of(dense.model), moments.half
    in_half = torch.zeros(chosen.count, dtype=torch.bool) if half is None else torch.isin(chosen.ids, half.image_ids)
    left = moments
    with torch.inference_mode(False), torch.no_grad():
        dense = _as_calibrated(dense, moments)
    for is_half in (False, True):
        places = (torch.isin(chosen.ids, left.image_ids) & (in_half == is_half)).nonzero().squeeze(1).tolist()
        if places:
            with torch.inference_mode(False), torch.no_grad():
                own = as_taken(left)
                part = calibrate(dense, chosen.subset(places), batch_size=16, device=where.type, statistics=own)
            left = moments_without(left, part)
            half = moments_without(half, part) if is_half and half is not None else half
    return replace(left, half=half)


def set_apart(dense: Checkpoint, moments: Moments, images: InputSet) -> ProbeSplit:
    """A few images, of groups of their own where groups of theirs are known, and the moments of the others. Of fewer
    than ALL_BELOW images all, and the moments as they are, as where nothing would be left of them.
    """
    few = images.count < ALL_BELOW
    by_group = moments.half is not None and not few
    places = _of_groups(images, moments) if by_group else []
    # Of images that the moments are not of no group is known.
    chosen = images if few else images.subset(places or _positions(images.count))
    left_out = (~torch.isin(images.ids, chosen.ids)).nonzero().squeeze(1).tolist()
    others = images.subset(left_out) if left_out else images
    apart = ProbeSplit(inputs=few_of(dense, chosen, IMAGES), moments=moments, others=others)
    if few or not torch.isin(chosen.ids, moments.image_ids).any():
        return apart
    left = [moments] if moments.half is None else [moments, moments.half]
    if any(torch.isin(each.image_ids, chosen.ids).all() for each in left):
        return apart
    return replace(apart, moments=_left(dense, moments, chosen))


def few_of(dense: Checkpoint, images: InputSet, most: int = FEW) -> Inputs:
    """At most so many of these, evenly; a FEW are enough for means over all their tokens."""
    spread = images.subset(_spread(images.count, most))
    (inputs,) = spread.batches(spread.count)
    return to_device(inputs, device_of(dense.model))


def _spread(count: int, most: int) -> list[int]:
    """At most so many positions, evenly."""
    return sorted({place * count // most for place in range(most)}) if count > most else list(range(count))
