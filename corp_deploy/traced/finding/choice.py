"""The labels that are removed when sites keep certain groups, and the heads that hold groups of several sites.

A head holds dimensions of values, queries and keys; it is removed when all of these are.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ground.errors import BadInput

from .flow import Flow, find_stuck, site_labels
from .site_groups import Index, SiteGroups
from .sites import FoundSites

Kept = Mapping[str, Sequence[int] | Index]
"""The groups that sites keep, by the sites' keys; a site that isn't named is kept whole."""


def removed_labels(analysis: FoundSites, kept: Kept) -> Tensor:
    """Return the mask [labels] of labels removed when sites keep these groups; raise BadInput if sites can't.

    A site that keeps nothing is folded to a constant later, so that its heads stay.
    """
    flow, by_key = analysis.flow, {site.key: site for site in analysis.sites}
    goes, folded_to_constant = (torch.zeros(flow.groups.count, dtype=torch.bool) for _ in range(2))
    for key, groups in kept.items():
        if key not in by_key:
            raise BadInput(f"{key}: no such site; there are {', '.join(by_key) or 'none'}")
        site = by_key[key]
        of_site = goes if len(groups) else folded_to_constant
        removed = np.setdiff1d(np.arange(site.size), _checked(site, groups))
        of_site[site_labels(flow, site)[torch.from_numpy(removed)]] = True
    return _with_empty_holders(flow, goes) | folded_to_constant


def _checked(site: SiteGroups, groups: Sequence[int] | Index) -> Index:
    chosen = np.unique(np.asarray(groups, dtype=np.int64))
    if len(chosen) and (chosen[0] < 0 or chosen[-1] >= site.size):
        raise BadInput(
            f"{site.key}: keeps groups {chosen[0]} to {chosen[-1]}, expected numbers from 0 to {site.size - 1}"
        )
    if site.part_G is not None:
        counts = np.bincount(site.part_G[chosen], minlength=site.parts)
        if len(set(counts[counts > 0].tolist())) > 1:
            raise BadInput(f"{site.key}: keeps {counts.tolist()} in its parts, expected as many in each, or none")
    return chosen


def _with_empty_holders(flow: Flow, goes: Tensor) -> Tensor:
    """Return the mask with labels that hold only removed ones, such as empty heads; raise BadInput if one must stay."""
    stays, head_labels = find_stuck(flow), flow.held_groups()
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
            "all of a head or of another part would be removed: keep some of each, or remove the queries, keys and "
            "values of a head together"
        )
    return goes


Holders = Mapping[int, set[int]]
"""The labels that hold a label, as heads hold dimensions, by the label held."""


def _holders_by_label(flow: Flow) -> Holders:
    holders = defaultdict[int, set[int]](set)
    for outer, inner in flow.held_groups():
        for one, other in zip(outer.tolist(), inner.tolist(), strict=True):
            holders[other].add(one)
    return holders


def _holders_of_groups(flow: Flow, holders: Holders, site: SiteGroups) -> list[set[int]]:
    return [holders.get(label, set()) for label in site_labels(flow, site)[:, 0].tolist()]


def find_head_groups(analysis: FoundSites, values: SiteGroups) -> dict[str, Index] | str:
    """Return, by key of a site of queries and keys, the head of `values` that each of its groups belongs to.

    Returns the reason instead if no head can be removed as a whole.
    """
    if values.part_G is None:
        return "it has a single head"
    holders, part_of = _holders_by_label(analysis.flow), defaultdict[int, set[int]](set)
    for part, labels in zip(values.part_G.tolist(), _holders_of_groups(analysis.flow, holders, values), strict=True):
        for label in labels:
            part_of[label].add(part)
    others: dict[str, Index] = {}
    for site in analysis.sites:
        if site.kind == "queries and keys":
            of_groups = _holders_of_groups(analysis.flow, holders, site)
            parts_of_groups = [{part for label in labels for part in part_of.get(label, ())} for labels in of_groups]
            if all(len(parts) == 1 for parts in parts_of_groups):
                others[site.key] = np.array([next(iter(parts)) for parts in parts_of_groups])
    without_first = {values.key: np.flatnonzero(values.part_G > 0)}
    without_first |= {key: np.flatnonzero(of_part > 0) for key, of_part in others.items()}
    try:
        removed_labels(analysis, without_first)
    except BadInput:
        return "a head can't be removed with all its queries, keys and values"
    return others


def jointly_narrowed(analysis: FoundSites, kept: Kept) -> list[list[str]]:
    """Return the keys of `kept` in lists; sites of one list lose the same heads, so all or none must be narrowed."""
    units, labels_of_units = list[list[str]](), list[set[int]]()
    holders: Holders = {}
    for site in analysis.sites:
        if site.key not in kept:
            continue
        labels = set[int]()
        if site.part_G is not None and len(np.unique(site.part_G[np.asarray(kept[site.key])])) < site.parts:
            holders = holders or _holders_by_label(analysis.flow)
            labels = set[int]().union(*_holders_of_groups(analysis.flow, holders, site))
        at = next((at for at, each in enumerate(labels_of_units) if each & labels), len(units))
        if at == len(units):
            units.append([])
            labels_of_units.append(labels)
        units[at].append(site.key)
    return units
