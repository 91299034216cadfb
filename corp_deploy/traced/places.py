"""Where groups stand: along the axes of parameters, and of the tensors that are summed over."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, fx

from .flow import Flow
from .site import Index

Standing = Literal["writes", "reads", "between", "heard", "bilinear"]


@dataclass(frozen=True, slots=True)
class Place:
    """Axes of a parameter, or of what a node gives; `node` uses it."""

    role: Standing
    name: str
    axes: tuple[int, ...]
    node: fx.Node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """Groups that stand in the same places: index [groups, places] of each, `group_G` their labels."""

    places: tuple[Place, ...]
    index: tuple[Index, ...]
    group_G: Tensor


def alike(flow: Flow, units: Tensor) -> Iterator[Alike]:
    """All groups for which `units` [labels] is true, sorted by where they stand, in order of the program."""
    labelled = list(_labelled(flow))
    rows = []
    for number, (_, labels) in enumerate(labelled):
        groups = flow.groups.of(labels.reshape(-1)).long()
        at = torch.nonzero((groups >= 0) & units[groups.clamp(min=0)])[:, 0]
        rows.append(torch.stack((groups[at], torch.full_like(at, number), at), 1))
    every = torch.cat(rows).numpy() if rows else np.empty((0, 3), dtype=np.int64)
    every = every[np.lexsort((every[:, 2], every[:, 1], every[:, 0]))]
    _, starts = np.unique(every[:, 0], return_index=True)
    by_places: dict[tuple[int, ...], list[Index]] = defaultdict(list)
    for of_group in np.split(every, starts[1:]) if len(every) else []:
        by_places[tuple(of_group[:, 1].tolist())].append(of_group)
    for numbers, members in sorted(by_places.items(), key=lambda item: (min(item[0]), int(item[1][0][0, 2]))):
        ordered: list[Index] = sorted(members, key=_positions)
        stacked = np.stack(ordered)
        used = list(dict.fromkeys(numbers))
        index = tuple(stacked[:, np.array(numbers) == number, 2] for number in used)
        places = tuple(labelled[number][0] for number in used)
        yield Alike(places=places, index=index, group_G=torch.from_numpy(stacked[:, 0, 0]))


def _positions(of_group: Index) -> list[int]:
    positions: list[int] = of_group[:, 2].tolist()
    return positions


def _labelled(flow: Flow) -> Iterator[tuple[Place, Tensor]]:
    """Writers first, each in order of the program."""
    order = {node: place for place, node in enumerate(flow.program.nodes)}
    for touch in sorted(flow.touches, key=lambda each: (each.role != "writes", order[each.node])):
        yield Place(touch.role, touch.constant, touch.axes, touch.node), touch.labels
    for hearing in flow.heard:
        role: Standing = "bilinear" if hearing.is_bilinear else "heard"
        yield Place(role, hearing.source.name, hearing.axes, hearing.reader), hearing.labels
