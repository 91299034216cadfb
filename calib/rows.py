"""Rows of named arrays, in memory or mapped, as a model's inputs: opened once, identified by content, read in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ground.errors import BadInput

from .input_set import Batch, ids_and_digest, positions_drawn

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of arrays of one length by name, those at `chosen`; whole numbers are given as they are kept, or as int64
    where `whole` says so.
    """

    noun: ClassVar[str] = "inputs"
    whole: ClassVar[bool] = False

    arrays: Arrays
    chosen: tuple[int, ...]
    ids: Tensor
    digest: str

    @classmethod
    def drawn(cls, arrays: Arrays, *, where: str, samples: int | None = None, seed: int = 0) -> Self:
        """`samples` of the rows, drawn by `seed` and read in order, or all. Raises BadInput for fewer."""
        count = len(next(iter(arrays.values())))
        chosen = positions_drawn(count, samples, seed, where=where, noun=cls.noun)
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

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Tensor]]:
        """All rows in order; the last batch may be smaller."""
        return (batch.inputs for batch in self.read(batch_size))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[Batch[Mapping[str, Tensor]]]:
        """Positions `first` to `stop`, by the names of the arrays."""
        if batch_size < 1:
            raise BadInput(f"batch size: got {batch_size}, expected at least 1")
        self.refuse_bad(bad)
        last = self.count if stop is None else stop
        for begin in range(first, last, batch_size):
            end = min(begin + batch_size, last)
            inputs = self._rows(range(begin, end))
            if pin:
                inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            yield Batch(inputs=inputs, ids=self.ids[begin:end], bad=(), end=end)

    def refuse_bad(self, bad: Sequence[str]) -> None:
        """Raises BadInput for any: a row that can't be read is met on opening."""
        if bad:
            raise BadInput("\n".join(bad))

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
        return rows.astype(np.int64) if cls.whole else rows

    @classmethod
    def _identified(cls, arrays: Arrays, chosen: tuple[int, ...]) -> tuple[Tensor, str]:
        """By each row's bytes as they are given, little-endian, array by array."""

        def content(place: int) -> bytes:
            rows = (cls._as_given(array[place]) for array in arrays.values())
            return b"".join(row.astype(row.dtype.newbyteorder("<")).tobytes() for row in rows)

        return ids_and_digest(map(str, chosen), [sha256(content(place)).digest() for place in chosen])
