"""Where groups stand: along the axes of parameters, and of the tensors that are summed over."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .flow import Flow, Use
from .site import Index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """Groups that are used in the same places: index [groups, places] in the labels of each use, `group_G` their
    labels.
    """

    uses: tuple[Use, ...]
    index: tuple[Index, ...]
    group_G: Tensor


def alike(flow: Flow, units: Tensor) -> Iterator[Alike]:
    """All groups for which `units` [labels] is true, sorted by where they are used, in order of the program; of each
    writers first and last what sums over it.
    """
    uses = sorted(flow.every_use, key=lambda use: (use.role != "writes") + 2 * (not use.is_of_constant))
    rows = [torch.empty(0, 3, dtype=torch.long)]
    for number, use in enumerate(uses):
        groups = flow.groups.of(use.labels.reshape(-1)).long()
        at = torch.nonzero((groups >= 0) & units[groups.clamp(min=0)])[:, 0]
        rows.append(torch.stack((groups[at], torch.full_like(at, number), at), 1))
    every = torch.cat(rows).numpy()
    every = every[np.lexsort((every[:, 2], every[:, 1], every[:, 0]))]
    starts = np.flatnonzero(np.diff(every[:, 0], prepend=-1))
    by_uses: dict[tuple[int, ...], list[Index]] = defaultdict(list)
    for of_group in np.split(every, starts)[1:]:
        by_uses[tuple(of_group[:, 1].tolist())].append(of_group)
    for numbers, members in sorted(by_uses.items(), key=lambda item: (min(item[0]), int(item[1][0][0, 2]))):
        ordered: list[Index] = sorted(members, key=_positions)
        stacked = np.stack(ordered)
        yield Alike(
            uses=tuple(uses[number] for number in dict.fromkeys(numbers)),
            index=tuple(stacked[:, np.array(numbers) == number, 2] for number in dict.fromkeys(numbers)),
            group_G=torch.from_numpy(stacked[:, 0, 0]),
        )


def _positions(of_group: Index) -> list[int]:
    positions: list[int] = of_group[:, 2].tolist()
    return positions
