"""What goes with each site: multiply-adds and parameters, those of a layer between two sites half with either."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from .choice import labels_of
from .cost import macs
from .flow import Flow, Use
from .labels import Marks, compact
from .sites import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """By a site's key, of one input.

    A layer that one site writes and another reads costs the product of what is left of both, never more than the mean:
    so costs that are added up are never too low.
    """

    macs: Mapping[str, int]
    parameters: Mapping[str, int]


def shares(found: Found, *, aside: Collection[str] = ()) -> Shares:
    """Of all sites; parameters of the names `aside` don't count."""
    owner = torch.full((found.flow.groups.count,), -1, dtype=torch.long)
    for number, site in enumerate(found.sites):
        owner[labels_of(found.flow, site, np.arange(site.size))] = number
    of_macs, of_parameters = (dict.fromkeys((site.key for site in found.sites), 0.0) for _ in range(2))
    keys = list(of_macs)
    for node, sides in _nodes(found.flow):
        _add(of_macs, keys, owner, found.flow, macs(node), sides)
    for name, sides in _constants(found.flow):
        if name not in aside:
            _add(of_parameters, keys, owner, found.flow, found.program.tensor(name).numel(), sides)
    return Shares(macs=_rounded(of_macs), parameters=_rounded(of_parameters))


def _rounded(costs: Mapping[str, float]) -> dict[str, int]:
    return {key: int(cost) for key, cost in costs.items()}


def _add(
    costs: dict[str, float], keys: list[str], owner: Tensor, flow: Flow, cost: int, sides: Iterable[Tensor]
) -> None:
    parts = [_parts(owner, flow, labels) for labels in sides if labels.numel()]
    parts = [each for each in parts if each]
    for each in parts:
        for number, share in each.items():
            costs[keys[number]] += cost * share / len(parts)


def _parts(owner: Tensor, flow: Flow, labels: Tensor) -> dict[int, float]:
    """Which share of labels is of which site."""
    roots = flow.groups.of(labels.reshape(-1)).long()
    sites = torch.where(roots < 0, roots, owner[roots.clamp(min=0)])
    numbers, counts = torch.unique(sites[sites >= 0], return_counts=True)
    return {int(number): int(count) / len(roots) for number, count in zip(numbers, counts, strict=True)}


def _nodes(flow: Flow) -> Iterator[tuple[fx.Node, list[Tensor]]]:
    """Contractions with the labels on their sides: of a weight, else of what they give and what they sum over."""
    for node in flow.program.nodes:
        if node.op == "call_function" and macs(node):
            sides = _sides(flow.constants_of(node))
            if not sides:
                value = flow.values[node]
                given = [compact(value.labels)] if isinstance(value, Marks) and value.labels is not None else []
                sides = given + [use.labels for use in flow.uses.get(node, ())][:1]
            yield node, sides


def _sides(uses: Iterable[Use]) -> list[Tensor]:
    """Of a layer's weight, which has more axes than its bias."""
    by_role: dict[str, Tensor] = {}
    for use in sorted(uses, key=lambda each: -each.labels.numel()):
        by_role.setdefault(use.role, use.labels)
    return list(by_role.values())


def _constants(flow: Flow) -> Iterator[tuple[str, list[Tensor]]]:
    uses: dict[str, list[Use]] = defaultdict(list)
    for use in flow.every_use:
        if use.is_of_constant:
            uses[use.name].append(use)
    parameters = dict(flow.program.graph.named_parameters(remove_duplicate=False))
    yield from ((name, _sides(own)) for name, own in uses.items() if name in parameters)
