"""What a closed loop of a traced model reduces, in order of the program: of an attention whole heads, then dimensions
of those left.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from corp_deploy.families.widths import Widths
from corp_deploy.traced.models.module import Tracing
from corp_deploy.traced.models.narrowing import first_groups
from corp_deploy.traced.models.offered import names_of
from corp_deploy.traced.models.sites import Site, Sites
from corp_deploy.traced.models.values import TracedValues
from corp_deploy.traced.narrowing.narrow import narrow

from .kinds import kind_of
from .method import Method
from .traced_change import TracedReduced, left_of
from .traced_values_kind import TracedValuesKind, beside_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A site reduced to a width by a method. `beside`: sites of which the same heads go. `place`: where the groups of
    any of these are summed over first.
    """

    site: Site
    width: int
    method: Method
    place: int
    beside: tuple[Site, ...] = ()


def steps_of(tracing: Tracing, sites: Sites, widths: Widths, method: Method) -> list[Step]:
    """Of all sites asked for."""
    order = {node.name: place for place, node in enumerate(tracing.program.nodes)}
    every = list(sites.every)
    steps = [step for site in every if site.name in widths for step in _steps(site, every, widths, method, order)]
    return sorted(steps, key=lambda step: (step.place, not step.beside))


def _steps(site: Site, every: list[Site], widths: Widths, method: Method, order: Mapping[str, int]) -> Iterator[Step]:
    width, place = widths[site.name], _place(site, order)
    left, dims_alone = _heads_left(site, method), replace(method, heads_sparsity=None)
    most = site.width // site.parts * left
    if left < site.parts:
        others = beside_heads(site, torch.arange(left))
        beside = tuple(each for each in every if each.name in others)
        first = min(_place(each, order) for each in (site, *beside))
        yield Step(site=site, width=most, method=method, place=first, beside=beside)
    if left == site.parts or width < most:
        yield Step(site=site, width=width, method=dims_alone, place=place)


def _place(site: Site, order: Mapping[str, int]) -> int:
    return min(order[span.reader] for span in site.groups.listening)


def _heads_left(site: Site, method: Method) -> int:
    kind = kind_of(site)
    if isinstance(site, TracedValues) and isinstance(kind, TracedValuesKind):
        return kind.heads_left(site, method)
    return site.parts


def irreducible_sites(dense: Tracing, sites: Sites, widths: Widths, method: Method) -> dict[str, str]:
    """Sites that no program can be written without groups of, with the reason, seen on the first ones of each part."""
    named = names_of(dense)
    names = {groups.key: name for name, groups in named.items()}
    first = {name: _first(sites.by_name[name], width, method) for name, width in widths.items()}
    kept = {named[name].key: groups for name, groups in left_of(first).items() if len(groups)}
    return {names[key]: reason for key, reason in narrow(dense.analysis, kept).unreduced.items()}


def _first(site: Site, width: int, method: Method) -> TracedReduced:
    """The first groups of the first parts."""
    left = _heads_left(site, method)
    kept = first_groups(site.groups, width, parts=left)
    beside = beside_heads(site, torch.arange(left)) if left < site.parts else {}
    return TracedReduced(reports=[], kept_K=torch.from_numpy(kept), beside=beside)
