"""A program narrowed to what is kept of its sites, proved against the dense one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .choice import Kept, gone
from .compaction import Uneven
from .compaction import kept as stays
from .flow import Flow
from .labels import compact
from .marks import Marks
from .narrowing import Refused, without
from .program import Inputs
from .proof import difference
from .resizing import narrowed
from .site import Site
from .sites import Found
from .splitting import split
from .walk import walked

ROUNDING = 1e-4
"""Of the largest output: what float32 rounds over a network in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """`module` is the program without what went; `whole`: sites that had to be kept, with the reason, by their keys.
    `difference`: from the dense program with the same elements zeroed, relative; None where it has no weights yet.
    """

    module: fx.GraphModule
    kept: Kept
    whole: dict[str, str]
    difference: float | None


def narrow(found: Found, kept: Kept) -> Narrowed:
    """The narrower program, by its labels alone; a site that can't be narrowed so is kept whole. Raises BadInput for a
    choice that can't be.
    """
    program, flow = found.program, found.flow
    chosen, whole = dict(kept), dict[str, str]()
    is_split = False
    while True:
        goes = gone(flow, found.sites, chosen)
        try:
            return Narrowed(module=without(program, flow, goes), kept=chosen, whole=whole, difference=None)
        except Refused as refused:
            parts = None if is_split else split(program, _uneven(flow, goes))
            is_split = True
            if parts is not None:
                program, flow = parts, walked(parts)
                continue
            for key in _at(flow, refused.node, goes, found.sites, chosen):
                del chosen[key]
                whole[key] = str(refused)


def _uneven(flow: Flow, goes: Tensor) -> Iterator[fx.Node]:
    """Nodes that can't be narrowed, in order of the program."""
    for node, value in flow.values.items():
        try:
            narrowed(value, goes)
        except Uneven:
            yield node


def _at(flow: Flow, node: fx.Node, goes: Tensor, sites: Sequence[Site], chosen: Kept) -> list[str]:
    """The sites of which elements go at a node; all that are left to go where none is known."""
    groups: set[int] = set()
    for each in (node, *node.all_input_nodes):
        values = flow.values.get(each)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, Marks) and value.labels is not None:
                small = compact(value.labels)
                groups |= set(flow.groups.of(small[~stays(small, goes)]).tolist())
    mine = [site.key for site in sites if site.key in chosen and _any_of(flow, site, chosen, groups)]
    return mine or list(chosen)


def _any_of(flow: Flow, site: Site, chosen: Kept, groups: set[int]) -> bool:
    own = gone(flow, [site], {site.key: chosen[site.key]})
    return bool(own[torch.tensor(sorted(groups), dtype=torch.long)].any()) if groups else False


def prove(found: Found, kept: Kept, inputs: Inputs) -> Narrowed:
    """As `narrow`, held on a batch against the dense program with what went zeroed; sites with which it differs are
    kept whole.
    """
    given = narrow(found, kept)
    apart = difference(found, gone(found.flow, found.sites, given.kept), given.module, inputs)
    if apart <= ROUNDING:
        return Narrowed(module=given.module, kept=given.kept, whole=given.whole, difference=apart)
    wrong = _wrong(found, given.kept, inputs)
    rest = {key: groups for key, groups in given.kept.items() if key not in wrong}
    again = prove(found, rest, inputs)
    whole = given.whole | dict.fromkeys(wrong, "the narrowed program differs from the dense one") | again.whole
    return Narrowed(module=again.module, kept=again.kept, whole=whole, difference=again.difference)


def _wrong(found: Found, kept: Kept, inputs: Inputs) -> list[str]:
    """The sites that differ by themselves, looked for by halves; all where only some together do."""
    front: list[list[str]] = [list(kept)]
    wrong: list[str] = []
    while front:
        keys = front.pop()
        part = {key: kept[key] for key in keys}
        if len(keys) == len(kept) or _apart(found, part, inputs) > ROUNDING:
            if len(keys) == 1:
                wrong += keys
            else:
                front += [keys[: len(keys) // 2], keys[len(keys) // 2 :]]
    return wrong or list(kept)


def _apart(found: Found, kept: Kept, inputs: Inputs) -> float:
    given = narrow(found, kept)
    return difference(found, gone(found.flow, found.sites, given.kept), given.module, inputs)
