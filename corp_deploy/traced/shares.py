"""What goes with each site: multiply-adds and parameters, those of a layer between two sites half with either."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from .choice import labels_of
from .cost import macs
from .flow import Flow, Hearing, Touch
from .labels import compact
from .marks import Marks
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
    """Contractions with the labels on their sides: what they sum over, and what they give."""
    heard: dict[fx.Node, Hearing] = {}
    for hearing in flow.heard:
        heard.setdefault(hearing.reader, hearing)
    for node in flow.program.nodes:
        if node.op != "call_function" or not macs(node):
            continue
        touches = flow.touches_of(node)
        sides = _sides(touches)
        if not touches:
            value = flow.values.get(node)
            given = compact(value.labels) if isinstance(value, Marks) and value.labels is not None else None
            sides = [each for each in (given, heard[node].labels if node in heard else None) if each is not None]
        yield node, sides


def _sides(touches: Iterable[Touch]) -> list[Tensor]:
    """Of a layer's weight, which has more axes than its bias."""
    by_role: dict[str, Tensor] = {}
    for touch in sorted(touches, key=lambda each: -each.labels.numel()):
        by_role.setdefault(touch.role, touch.labels)
    return list(by_role.values())


def _constants(flow: Flow) -> Iterator[tuple[str, list[Tensor]]]:
    touches: dict[str, list[Touch]] = defaultdict(list)
    for touch in flow.touches:
        touches[touch.constant].append(touch)
    parameters = dict(flow.program.graph.named_parameters(remove_duplicate=False))
    yield from ((name, _sides(own)) for name, own in touches.items() if name in parameters)
