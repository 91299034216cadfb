"""Moments of a two-fold validation split of the images, by groups: a fit to either half is validated on the other."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from calib.combination import merge
from calib.groups import second_half_mask, split_by_mask
from calib.inputs import InputSet
from calib.moments import Moments

SUMS_HELD = 3  # times what one pass takes: both halves, and their sum


def of_splits(images: InputSet, groups_B: Tensor, first: Moments, second: Moments) -> Moments:
    """The moments of all images, from those of both halves of them."""
    merged = merge(first, second)
    group_of = dict(zip(images.ids.tolist(), groups_B.tolist(), strict=True))
    groups = torch.tensor([group_of[each] for each in merged.image_ids.tolist()], dtype=torch.int64)
    lineage = {**merged.lineage, "images": images.digest}
    return replace(merged, lineage=lineage, group_ids=groups, half=second)


def in_splits(images: InputSet, groups_B: Tensor, take: Callable[[InputSet, int], Moments], *, seed: int) -> Moments:
    """The moments of all images with those of one half beside them; `take` is given a half and its number, 0 or 1.

    Raises BadInput where all images are of one group.
    """
    second_B = second_half_mask(groups_B, seed=seed, noun=images.noun)
    first, second = (take(half, number) for number, half in enumerate(split_by_mask(images, second_B)))
    return of_splits(images, groups_B, first, second)
