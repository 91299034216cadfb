"""Rows of named arrays, in memory or mapped, as a model's inputs: opened once, identified by content, read in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .indexed_inputs import IndexedInputs
from .input_set import ids_and_digest, sampled_positions

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows(IndexedInputs):
    """Rows of arrays of one length by name, those at `chosen`; whole numbers are given as they are kept, or as int64
    where `as_int64` says so.
    """

    noun: ClassVar[str] = "inputs"
    as_int64: ClassVar[bool] = False

    arrays: Arrays
    chosen: tuple[int, ...]
    ids: Tensor
    digest: str

    @classmethod
    def sampled(cls, arrays: Arrays, *, where: str, samples: int | None = None, seed: int = 0) -> Self:
        """`samples` of the rows, drawn by `seed` and read in order, or all. Raises BadInput for fewer."""
        count = len(next(iter(arrays.values())))
        chosen = sampled_positions(count, samples, seed, where=where, noun=cls.noun)
        ids, digest = cls._identified(arrays, chosen)
        return cls(arrays=arrays, chosen=chosen, ids=ids, digest=digest)

    @property
    def count(self) -> int:
        return len(self.chosen)

    @property
    def available(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def places(self) -> tuple[int, ...]:
        return self.chosen

    def name(self, position: int) -> str:
        return str(self.chosen[position])

    def example(self) -> Mapping[str, Tensor]:
        """The first row."""
        return self._rows(range(1))

    def subset(self, positions: Sequence[int]) -> Self:
        """The rows at these positions alone."""
        chosen = tuple(self.chosen[position] for position in positions)
        ids, digest = self._identified(self.arrays, chosen)
        return replace(self, chosen=chosen, ids=ids, digest=digest)

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        places = [self.chosen[position] for position in positions]
        return {
            name: torch.from_numpy(self._as_given(np.stack([array[place] for place in places])))
            for name, array in self.arrays.items()
        }

    @classmethod
    def _as_given(cls, rows: NDArray[Any]) -> NDArray[Any]:
        return rows.astype(np.int64) if cls.as_int64 else rows

    @classmethod
    def _identified(cls, arrays: Arrays, chosen: tuple[int, ...]) -> tuple[Tensor, str]:
        """By each row's bytes as they are given, little-endian, array by array."""

        def content(place: int) -> bytes:
            rows = (cls._as_given(array[place]) for array in arrays.values())
            return b"".join(row.astype(row.dtype.newbyteorder("<")).tobytes() for row in rows)

        return ids_and_digest(map(str, chosen), [sha256(content(place)).digest() for place in chosen])
