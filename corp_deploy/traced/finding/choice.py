"""What can be removed, and what is: of every site the groups that aren't kept, and what goes along with them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ground.errors import BadInput

from .flow import Flow
from .site import Index, Site

Kept = Mapping[str, Sequence[int] | Index]
"""Of sites by their keys the groups that are kept; a site that isn't named is kept whole."""


def stuck(flow: Flow) -> Tensor:
    """Whether each label [labels] names a group that can't go."""
    stays = flow.groups.reason_of(torch.arange(flow.groups.count)) > 0
    head_labels = flow.held_groups()
    while True:
        before = stays.clone()
        for outer, inner in head_labels:
            stays[outer[stays[inner]]] = True
            alone = torch.bincount(outer, minlength=len(stays)) == 1
            stays[inner[(alone & stays)[outer]]] = True
        if torch.equal(before, stays):
            return stays


def holders(flow: Flow) -> Tensor:
    """Whether each label [labels] names a group that holds others."""
    holds = torch.zeros(flow.groups.count, dtype=torch.bool)
    for outer, _ in flow.held_groups():
        holds[outer] = True
    return holds


def gone(flow: Flow, sites: Iterable[Site], kept: Kept) -> Tensor:
    """Whether each label [labels] goes, by the group that it is in; where none of a site is kept, whatever holds it
    stays. Raises BadInput for a choice that can't be.
    """
    by_key = {site.key: site for site in sites}
    goes, folded_to_constant = (torch.zeros(flow.groups.count, dtype=torch.bool) for _ in range(2))
    for key, groups in kept.items():
        if key not in by_key:
            raise BadInput(f"{key}: no such site; there are {', '.join(by_key) or 'none'}")
        site = by_key[key]
        of_site = goes if len(groups) else folded_to_constant
        of_site[labels_of(flow, site, np.setdiff1d(np.arange(site.size), _checked(site, groups)))] = True
    return _taken_along(flow, goes) | folded_to_constant


def _checked(site: Site, groups: Sequence[int] | Index) -> Index:
    chosen = np.unique(np.asarray(groups, dtype=np.int64))
    if len(chosen) and (chosen[0] < 0 or chosen[-1] >= site.size):
        raise BadInput(f"{site.key}: keeps groups {chosen[0]} to {chosen[-1]} of {site.size}, expected them by number")
    if site.part_G is not None:
        counts = np.bincount(site.part_G[chosen], minlength=site.parts)
        if len(set(counts[counts > 0].tolist())) > 1:
            raise BadInput(f"{site.key}: keeps {counts.tolist()} in its parts, expected as many in each, or none")
    return chosen


def labels_of(flow: Flow, site: Site, groups: Index) -> Tensor:
    """Of groups of a site, int64, by where its writers stand: the same in any program with these parameters."""
    first = site.writers[0]
    labels = next(
        use.labels for use in flow.every_use if (use.name, use.axes, use.role) == (first.name, first.axes, "writes")
    )
    places = torch.from_numpy(first.index_GM[groups].reshape(-1))
    return flow.groups.of(labels.reshape(-1)[places])


def _taken_along(flow: Flow, goes: Tensor) -> Tensor:
    """What holds nothing any more by some relation, and by none still something, goes too, as a head without dimensions
    does. Raises BadInput where it can't.
    """
    stays, head_labels = stuck(flow), flow.held_groups()
    while True:
        lost, left = torch.zeros_like(goes), torch.zeros_like(goes)
        for outer, inner in head_labels:
            holds = torch.zeros_like(goes)
            holds[outer[~goes[inner]]] = True
            left |= holds
            lost[outer] |= ~holds[outer]
        more = goes | (lost & ~left & ~stays)
        if torch.equal(more, goes):
            break
        goes = more
    if bool((lost & ~goes).any()):
        raise BadInput(
            "all of a head or of another part would go: keep some of each, or let queries, keys and values "
            "of a head go together"
        )
    return goes
