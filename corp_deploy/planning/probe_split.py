"""The probe split of a budget: images that error curves are measured on, and moments of all other images.

Errors on the images of the fit are too small, those of an MLP more so than those of queries and keys, so that curves
measured on these images would spare the wrong sites. Moments are sums, so those of the probe's images are subtracted.
"""

from dataclasses import dataclass, replace

import torch

from calib.combination import moments_without
from calib.inputs import Inputs, InputSet, to_device
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.reduction.calibrate import calibrate, statistics_of
from corp_deploy.reduction.moments import merging_note
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.store.input_sets import merging_of_moments
from corp_deploy.traced.models.module import device_of

IMAGES = 32  # largest number of images in a probe
IN_LOOP = 96  # largest number of images that a closed loop is tried on
ALL_BELOW = 16  # fewer images than these are not split
GROUPS = 8  # groups that widths are judged by: three of 37 photographs were too few
FEW = 16  # images that are enough for a mean over all of their tokens
RUNS = 4  # runs of neighbouring images that a probe's images form


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSplit:
    """The probe's inputs, the moments without them, and the other images: all images if the probe uses all."""

    inputs: Inputs
    moments: Moments
    others: InputSet

    @property
    def loop_images(self) -> InputSet:
        """The images that a closed loop is fitted to on trial: at most IN_LOOP of the others, evenly spaced."""
        return self.others.subset(_spread(self.others.count, IN_LOOP))


def _positions(count: int) -> list[int]:
    """Return positions in RUNS runs of neighbours, at most IMAGES and about a quarter of `count`.

    Neighbouring images are often crops of one picture, which must not be on both sides of the split.
    """
    run = max(min(IMAGES, count // 4) // RUNS, 1)
    return sorted({start * count // RUNS + place for start in range(RUNS) for place in range(run)})


def _group_positions(images: InputSet, moments: Moments) -> list[int]:
    """Return the positions of the images of evenly spaced groups: as few as have IMAGES images and are GROUPS.

    They have no more than about a quarter of all images.
    """
    group_of = dict(zip(moments.image_ids.tolist(), moments.group_ids.tolist(), strict=True))
    groups = [group_of.get(image) for image in images.ids.tolist()]
    names = list(dict.fromkeys(group for group in groups if group is not None))
    chosen, most = set[int](), images.count // 4
    for count in range(1, len(names)):
        chosen = {names[(2 * place + 1) * len(names) // (2 * count)] for place in range(count)}
        apart = sum(group in chosen for group in groups)
        if apart >= most or (apart >= IMAGES and count >= GROUPS):
            break
    return [place for place, group in enumerate(groups) if group in chosen]


def _moments_without(dense: Checkpoint, moments: Moments, chosen: InputSet) -> Moments:
    """Return the moments, and those of their recorded half, without the chosen images.

    The chosen images are calibrated with the merging that the moments were computed with: only sums over the same
    tokens can be subtracted.
    """
    where, half = device_of(dense.model), moments.half
    in_half = torch.zeros(chosen.count, dtype=torch.bool) if half is None else torch.isin(chosen.ids, half.image_ids)
    left = moments
    if merging_note(dense.model, moments):
        with torch.inference_mode(False), torch.no_grad():
            dense = replace(dense, model=traced_model.with_merging(dense.model, merging_of_moments(moments.lineage)))
    for is_half in (False, True):
        places = (torch.isin(chosen.ids, left.image_ids) & (in_half == is_half)).nonzero().squeeze(1).tolist()
        if places:
            with torch.inference_mode(False), torch.no_grad():
                own = statistics_of(left)
                part = calibrate(dense, chosen.subset(places), batch_size=16, device=where.type, statistics=own)
            left = moments_without(left, part)
            half = moments_without(half, part) if is_half and half is not None else half
    return replace(left, half=half)


def set_apart(dense: Checkpoint, moments: Moments, images: InputSet) -> ProbeSplit:
    """Choose the probe's images and subtract them from the moments.

    If calibration recorded groups, the probe gets whole groups. If there are fewer than ALL_BELOW images, the probe
    gets all of them and nothing is subtracted. Nothing is subtracted either if no image of the moments would be left.
    """
    few = images.count < ALL_BELOW
    by_group = len(moments.group_ids) > 0 and not few
    places = _group_positions(images, moments) if by_group else []
    # Images that the moments are not made of have no group.
    chosen = images if few else images.subset(places or _positions(images.count))
    left_out = (~torch.isin(images.ids, chosen.ids)).nonzero().squeeze(1).tolist()
    others = images.subset(left_out) if left_out else images
    apart = ProbeSplit(inputs=draw_inputs(dense, chosen, IMAGES), moments=moments, others=others)
    if few or not torch.isin(chosen.ids, moments.image_ids).any():
        return apart
    left = [moments] if moments.half is None else [moments, moments.half]
    if any(torch.isin(each.image_ids, chosen.ids).all() for each in left):
        return apart
    return replace(apart, moments=_moments_without(dense, moments, chosen))


def draw_inputs(dense: Checkpoint, images: InputSet, most: int = FEW) -> Inputs:
    """Return at most `most` of the images, evenly spaced, on the model's device."""
    spread = images.subset(_spread(images.count, most))
    (inputs,) = spread.batches(spread.count)
    return to_device(inputs, device_of(dense.model))


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` positions below `count`, evenly spaced."""
    return sorted({place * count // most for place in range(most)}) if count > most else list(range(count))
