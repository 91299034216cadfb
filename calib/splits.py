"""Splits of inputs: those that are fitted to, with their groups, and held-out ones."""

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from ground.errors import BadInput

from .groups import UNGROUPED, group_ids, held_out_groups
from .inputs import SomeSet, held_out_split
from .related import find_related


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Generic[SomeSet]):
    """Inputs for the fit with their groups, if any, and the held-out inputs.

    `found_by`: how groups that nobody gave were found, see find_related.
    """

    fitted: SomeSet
    groups_B: Tensor | None = None
    held_out: SomeSet | None = None
    found_by: str = ""


def split_for_calibration(inputs: SomeSet, *, hold_out: int | None, groups: str | None, seed: int) -> Split[SomeSet]:
    """Return a Split that holds out `hold_out` inputs drawn by `seed`, in whole groups, or none for None.

    `groups` is read by group_ids; None looks for groups by find_related, and UNGROUPED does not.

    Raises:
        BadInput: one part would be empty.
    """
    if groups is not None and groups != UNGROUPED:
        inputs = inputs.identified()
        return _in_groups(inputs, group_ids(inputs, groups), hold_out, seed)
    inputs = inputs if hold_out is None else inputs.identified()
    if groups is None and (related := find_related(inputs)) is not None:
        groups_B, found_by = related
        try:
            return _in_groups(inputs, groups_B, hold_out, seed, found_by)
        except BadInput:  # so many are held out that nobody can be fitted to in whole groups
            pass
    if hold_out is None:
        return Split(fitted=inputs)
    fitted, held_out = held_out_split(inputs, hold_out, seed=seed)
    return Split(fitted=fitted, held_out=held_out)


def _in_groups(
    inputs: SomeSet, groups_B: Tensor, hold_out: int | None, seed: int, found_by: str = ""
) -> Split[SomeSet]:
    if hold_out is None:
        return Split(fitted=inputs, groups_B=groups_B, found_by=found_by)
    fitted, held_out, left_B = held_out_groups(inputs, groups_B, hold_out, seed=seed)
    return Split(fitted=fitted, groups_B=left_B, held_out=held_out, found_by=found_by)
