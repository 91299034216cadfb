"""The multiply-adds and parameters of each site's layers; a layer between two sites counts half for either."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from numpy.polynomial import Polynomial
from torch import Tensor, fx

from corp_deploy.traced.programs.attention_masks import SDPA
from corp_deploy.traced.programs.program import module_of, operation

from .flow import Flow, Use, site_labels
from .labels import LabelTensor, compact
from .sites import FoundSites

EXACT = 1e-9
"""The share of a side below which what is left of the side counts as nothing."""


@dataclass(frozen=True, kw_only=True)  # without slots, for the cached property
class LayerCosts:
    """The costs of layers, and the sites' shares of each side of a layer, such as its rows or columns.

    `every`: per layer its cost, and per side the share of each site by key. `places`: the module path or the parameter
    name of each layer. `streams`: the keys of streams.
    """

    every: tuple[tuple[float, tuple[Mapping[str, float], ...]], ...]
    places: tuple[str, ...]
    streams: frozenset[str]

    @cached_property
    def alone(self) -> Counter[str]:
        """The cost of each site's layers: all of a layer beside a stream, half of a layer between two other sites.

        A layer between two narrowed sites costs the product of both kept shares, which is at most their mean. So a
        model's cost that is added up from sites other than streams is never too low.
        """
        totals = defaultdict[str, float](float)
        for cost, sides in self.every:
            for key, share in self._shared(sides).items():
                totals[key] += cost * share
        return Counter({key: int(total) for key, total in totals.items()})

    def _shared(self, sides: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Return each site's share of a layer's cost, by key, split evenly among the sides that can lose elements."""
        counted = [side for side in sides if not side.keys() <= self.streams] or sides
        parts: dict[str, float] = defaultdict(float)
        for at, side in enumerate(counted):
            others = (sum(other.values()) for other in (*counted[:at], *counted[at + 1 :]))
            # A side gets the mean of 1 / (1 + removable other sides), which is the integral of t ** others.
            part = math.prod((Polynomial((1.0 - can_go, can_go)) for can_go in others), start=Polynomial((1.0,)))
            for key, share in side.items():
                parts[key] += share * part.integ()(1.0)
        return parts

    def without(self, keys: Collection[str]) -> Mapping[str, float]:
        """Return, by place, the cost that removing all of these sites leaves, with shared layers split among sites."""
        left: dict[str, float] = defaultdict(float)
        for (cost, sides), place in zip(self.every, self.places, strict=True):
            left[place] += cost * (1.0 - sum(share for key, share in self._shared(sides).items() if key in keys))
        return left

    def of_others(self, keys: Collection[str]) -> "LayerCosts":
        """Return the layers' costs that remain, shared among other sites, once all groups of these are removed."""
        every, places = [], []
        for (cost, sides), place in zip(self.every, self.places, strict=True):
            left = [1.0 - sum(share for key, share in side.items() if key in keys) for side in sides]
            if min(left, default=1.0) > EXACT:
                others = (
                    {key: share / part for key, share in side.items() if key not in keys}
                    for side, part in zip(sides, left, strict=True)
                )
                every.append((cost * math.prod(left), tuple(side for side in others if side)))
                places.append(place)
        return replace(self, every=tuple(every), places=tuple(places))

    def saved(self, left: Mapping[str, float]) -> float:
        """Return the cost saved when sites, by key, keep the shares `left` of their groups, and others keep all."""

        def left_of(side: Mapping[str, float]) -> float:
            return 1.0 - sum(share * (1.0 - left.get(key, 1.0)) for key, share in side.items())

        return sum(cost * (1.0 - math.prod(map(left_of, sides))) for cost, sides in self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The multiply-adds of one input and the parameters, shared among sites."""

    macs: LayerCosts
    parameters: LayerCosts


def compute_shares(analysis: FoundSites, *, aside: Collection[str] = ()) -> Shares:
    """Share multiply-adds and parameters among all sites; parameters of the names `aside` don't count."""
    flow, program = analysis.flow, analysis.program
    owner = torch.full((flow.groups.count + 1,), -1)
    for number, site in enumerate(analysis.sites):
        owner[site_labels(flow, site)] = number
    parameters = dict(program.graph.named_parameters(remove_duplicate=False))
    of_constants: dict[str, list[Use]] = defaultdict(list)
    for use in flow.every_use:
        if use.is_of_constant and use.name in parameters and use.name not in aside:
            of_constants[use.name].append(use)
    costs = [
        (*each, module_of(node)[0])
        for node, cost in analysis.costs.items()
        if cost
        for each in _products(flow, node, cost)
    ]
    counts = {name: parameters[name].numel() for name in of_constants}  # 0 of no register tokens, which have no side
    sizes = [(counts[name], _largest(uses), name) for name, uses in of_constants.items() if counts[name]]
    return Shares(macs=_layers(analysis, owner, costs), parameters=_layers(analysis, owner, sizes))


def _layers(analysis: FoundSites, owner: Tensor, costs: Sequence[tuple[int, list[Tensor], str]]) -> LayerCosts:
    keys = [site.key for site in analysis.sites]
    every = []
    for cost, sides, _ in costs:
        owners = [owner[analysis.flow.groups.of(labels.reshape(-1))] for labels in sides]
        counts = [torch.bincount(each[each >= 0], minlength=len(keys)).double() / len(each) for each in owners]
        shared = [{keys[at]: float(count[at]) for at in count.nonzero()[:, 0].tolist()} for count in counts]
        every.append((cost, tuple(side for side in shared if side)))
    streams = frozenset(site.key for site in analysis.sites if site.kind == "stream")
    return LayerCosts(every=tuple(every), places=tuple(place for *_, place in costs), streams=streams)


def _products(flow: Flow, node: fx.Node, cost: int) -> list[tuple[int, list[Tensor]]]:
    """Return a node's products, each as its cost and the labels of its sides.

    The sides are those of a contraction's weight, else the result and what is summed over. A fused attention is two
    products, of queries and keys and of values; tables that are added to its scores count as no weight.
    """
    is_attention = operation(node) == SDPA
    if not is_attention and (uses := flow.constants_of(node)):
        weight = max(uses, key=lambda use: flow.program.tensor(use.name).numel()).name
        return [(cost, _largest(use for use in uses if use.name == weight))]
    value = flow.values[node]
    sides = [compact(value.labels)] if isinstance(value, LabelTensor) and value.labels is not None else []
    sides += [use.labels for use in flow.uses.get(node, ())][:1]
    return [(cost // 2, [side]) for side in sides] if is_attention and sides else [(cost, sides)]


def _largest(uses: Iterable[Use]) -> list[Tensor]:
    by_role: dict[str, Tensor] = {}
    for use in sorted(uses, key=lambda each: -each.labels.numel()):
        by_role.setdefault(use.role, use.labels)
    return list(by_role.values())
