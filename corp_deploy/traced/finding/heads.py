"""Heads that hold dimensions of several sites: values, and the queries and keys that go with a head of them."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from ground.errors import BadInput

from .choice import Kept, gone, labels_of
from .flow import Flow
from .site import Index, Site
from .sites import Found

Holders = Mapping[int, set[int]]
"""By label, what holds it."""


def holders_of(flow: Flow) -> Holders:
    holders = defaultdict[int, set[int]](set)
    for outer, inner in flow.held_groups():
        for one, other in zip(outer.tolist(), inner.tolist(), strict=True):
            holders[other].add(one)
    return holders


def _of_groups(flow: Flow, holders: Holders, site: Site) -> list[set[int]]:
    """What holds each group of a site."""
    places = site.writers[0].index_GM.shape[1]
    labels = labels_of(flow, site, np.arange(site.size)).view(-1, places)[:, 0]
    return [holders.get(label, set()) for label in labels.tolist()]


def beside(analysis: Found, values: Site) -> dict[str, Index] | str:
    """By the keys of sites whose groups are of the same heads as those of `values`, which part of it each of their
    groups is of; or why no head goes whole.
    """
    if values.part_G is None:
        return "it has a single head"
    holders, part_of = holders_of(analysis.flow), defaultdict[int, set[int]](set)
    for part, labels in zip(values.part_G.tolist(), _of_groups(analysis.flow, holders, values), strict=True):
        for label in labels:
            part_of[label].add(part)
    others: dict[str, Index] = {}
    for site in analysis.sites:
        if site.kind == "queries and keys":
            of_groups = _of_groups(analysis.flow, holders, site)
            parts_of_groups = [{part for label in labels for part in part_of.get(label, ())} for labels in of_groups]
            if all(len(parts) == 1 for parts in parts_of_groups):
                others[site.key] = np.array([next(iter(parts)) for parts in parts_of_groups])
    first = {values.key: np.flatnonzero(values.part_G > 0)}
    first |= {key: np.flatnonzero(of_part > 0) for key, of_part in others.items()}
    try:
        gone(analysis.flow, analysis.sites, first)
    except BadInput:
        return "what a head of it is made of can't go as a whole"
    return others


def together(analysis: Found, kept: Kept) -> list[list[str]]:
    """The keys of what is kept; those of which the same heads go are narrowed together or not at all."""
    units, labels_of_units = list[list[str]](), list[set[int]]()
    holders: Holders = {}
    for site in analysis.sites:
        if site.key not in kept:
            continue
        labels = set[int]()
        if site.part_G is not None and len(np.unique(site.part_G[np.asarray(kept[site.key])])) < site.parts:
            holders = holders or holders_of(analysis.flow)
            labels = set[int]().union(*_of_groups(analysis.flow, holders, site))
        at = next((at for at, each in enumerate(labels_of_units) if each & labels), len(units))
        if at == len(units):
            units.append([])
            labels_of_units.append(labels)
        units[at].append(site.key)
    return units
