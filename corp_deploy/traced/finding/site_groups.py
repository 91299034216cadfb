"""A site of a program: groups of elements that are removed together, and where each of them stands."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["channels", "gated channels", "convolution channels", "queries and keys", "values", "stream"]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Where the groups of a site stand in a tensor: index_GM [groups, places] counts along `axes`, the last fastest.

    `name`: of a parameter or constant; of a node for what is listened to, `reader` being the node that sums over it.
    """

    name: str
    axes: tuple[int, ...]
    index_GM: Index
    reader: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteGroups:
    """What can be removed group by group: `writers` lose rows, `readers` columns, `between` what stands channelwise.

    `listening`: the tensors that are summed over, both sides for queries and keys. `part_G`: the head, or another
    part, that each group is of; as many are kept in each. None where groups are free.
    """

    name: str
    kind: Kind
    size: int
    writers: tuple[Span, ...]
    readers: tuple[Span, ...]
    between: tuple[Span, ...]
    listening: tuple[Span, ...]
    part_G: Index | None

    @property
    def key(self) -> str:
        """What it is called by, once in a program."""
        return f"{self.name} {self.kind}"

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of its parameters and constants."""
        return *self.writers, *self.readers, *self.between

    @property
    def parts(self) -> int:
        """How many parts, of as many groups each."""
        return 1 if self.part_G is None else int(self.part_G.max()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedElements:
    """Elements that a parameter writes and that can't be removed."""

    name: str
    count: int
    reason: str
