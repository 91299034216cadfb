"""Sites of a program: groups of elements that are removed together, and the places of each in the program's tensors."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["channels", "gated channels", "convolution channels", "queries and keys", "values", "stream"]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """The places of a site's groups in a tensor: flat indices index_GM [groups, places] into `axes`, the last fastest.

    `name`: the name of a parameter or constant; or that of a node whose result the node `reader` sums over.
    """

    name: str
    axes: tuple[int, ...]
    index_GM: Index
    reader: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteGroups:
    """The groups of a site: `writers` lose rows, `readers` columns, `between` elements of channelwise parameters.

    `listening`: the tensors that are summed over, both sides for queries and keys. `part_G`: the head or other part of
    each group, all of which keep equally many; None if any groups may be removed.
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
        """The name and kind, unique in a program."""
        return f"{self.name} {self.kind}"

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of writers, readers and `between`, which are those in parameters and constants."""
        return *self.writers, *self.readers, *self.between

    @property
    def parts(self) -> int:
        """The number of parts, such as heads; 1 without any."""
        return 1 if self.part_G is None else int(self.part_G.max()) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedElements:
    """The number of rows of a parameter that can't be removed, with the first reason."""

    name: str
    count: int
    reason: str
