"""Inputs parted into those that are fitted to and those that are held out: the same two wherever it is asked for."""

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from .groups import group_ids, held_out_groups
from .input_set import SomeSet, held_out_split


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Generic[SomeSet]):
    """The inputs that are fitted to with the group of each, if any, and those held out."""

    fitted: SomeSet
    groups_B: Tensor | None = None
    held_out: SomeSet | None = None


def split_of(inputs: SomeSet, *, hold_out: int | None, groups: str | None, seed: int) -> Split[SomeSet]:
    """`hold_out` of the inputs, drawn by `seed`, are held out; with `groups` (see group_ids) whole groups are, until
    they have as many. Raises BadInput where nothing is left on a side, and for groups that the inputs don't have.
    """
    if groups is None:
        if hold_out is None:
            return Split(fitted=inputs)
        fitted, held_out = held_out_split(inputs, hold_out, seed=seed)
        return Split(fitted=fitted, held_out=held_out)
    groups_B = group_ids(inputs, groups)
    if hold_out is None:
        return Split(fitted=inputs, groups_B=groups_B)
    fitted, held_out, groups_B = held_out_groups(inputs, groups_B, hold_out, seed=seed)
    return Split(fitted=fitted, groups_B=groups_B, held_out=held_out)
