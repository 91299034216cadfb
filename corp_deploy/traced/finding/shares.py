"""What goes with each site: multiply-adds and parameters, those of a layer between two sites half with either."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from .choice import labels_of
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
    flow, program = found.flow, found.program
    owner = torch.full((flow.groups.count + 1,), -1)
    for number, site in enumerate(found.sites):
        owner[labels_of(flow, site, np.arange(site.size))] = number
    parameters = dict(program.graph.named_parameters(remove_duplicate=False))
    of_constants: dict[str, list[Use]] = defaultdict(list)
    for use in flow.every_use:
        if use.is_of_constant and use.name in parameters and use.name not in aside:
            of_constants[use.name].append(use)
    costs = [(cost, _sides(flow, node)) for node, cost in found.costs.items() if cost]
    sizes = [(parameters[name].numel(), _largest(uses)) for name, uses in of_constants.items()]
    keys = [site.key for site in found.sites]
    return Shares(macs=_summed(flow, owner, keys, costs), parameters=_summed(flow, owner, keys, sizes))


def _summed(
    flow: Flow, owner: Tensor, keys: Sequence[str], costs: Iterable[tuple[int, list[Tensor]]]
) -> dict[str, int]:
    """By site its share of every cost, by the labels on the sides of each that are of any site."""
    totals = torch.zeros(len(keys), dtype=torch.float64)
    for cost, sides in costs:
        owners = [owner[flow.groups.of(labels.reshape(-1))] for labels in sides]
        counts = [torch.bincount(each[each >= 0], minlength=len(keys)).double() for each in owners]
        counted = [count / len(each) for count, each in zip(counts, owners, strict=True) if bool(count.any())]
        for shares in counted:
            totals += cost / len(counted) * shares
    return dict(zip(keys, totals.long().tolist(), strict=True))


def _sides(flow: Flow, node: fx.Node) -> list[Tensor]:
    """The labels of a contraction's weight, else of what it gives and what it sums over."""
    if sides := _largest(flow.constants_of(node)):
        return sides
    value = flow.values[node]
    given = [compact(value.labels)] if isinstance(value, Marks) and value.labels is not None else []
    return given + [use.labels for use in flow.uses.get(node, ())][:1]


def _largest(uses: Iterable[Use]) -> list[Tensor]:
    """By role, as of a weight, which has more axes than its bias."""
    by_role: dict[str, Tensor] = {}
    for use in sorted(uses, key=lambda each: -each.labels.numel()):
        by_role.setdefault(use.role, use.labels)
    return list(by_role.values())
