"""Sequences of token ids, all of one length: rows of an array, in memory or mapped, identified by content.

Shapes: S sequences, N tokens of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ground.arrays import array_from_npy
from ground.errors import BadInput

from .input_set import Batch, ids_and_digest, positions_drawn

NAME = "input_ids"
SUFFIX = ".npy"
_ROWS = 1024  # read at once where a file is checked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """Rows of ids_SN, those at `chosen`."""

    noun: ClassVar[str] = "sequences"

    ids_SN: NDArray[Any]
    chosen: tuple[int, ...]
    ids: Tensor
    digest: str

    @property
    def count(self) -> int:
        return len(self.chosen)

    @property
    def available(self) -> int:
        return len(self.ids_SN)

    @property
    def places(self) -> tuple[int, ...]:
        return self.chosen

    def name(self, position: int) -> str:
        return str(self.chosen[position])

    def example(self) -> Mapping[str, Tensor]:
        """The first sequence."""
        return self._rows(range(1))

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Tensor]]:
        """All sequences in order; the last batch may be smaller."""
        return (batch.inputs for batch in self.read(batch_size))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[Batch[Mapping[str, Tensor]]]:
        """Positions `first` to `stop`: int64 [B,N] under `input_ids`."""
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

    def subset(self, positions: Sequence[int]) -> "Sequences":
        """The sequences at these positions alone."""
        chosen = tuple(self.chosen[position] for position in positions)
        ids, digest = _identified(self.ids_SN, chosen)
        return replace(self, chosen=chosen, ids=ids, digest=digest)

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        rows_BN = np.stack([self.ids_SN[self.chosen[position]] for position in positions])
        return {NAME: torch.from_numpy(rows_BN.astype(np.int64))}


def _identified(ids_SN: NDArray[Any], chosen: Sequence[int]) -> tuple[Tensor, str]:
    """By the ids as int64, whatever type they are kept in."""
    hashes = [sha256(ids_SN[place].astype("<i8").tobytes()).digest() for place in chosen]
    return ids_and_digest(map(str, chosen), hashes)


def sequences_of(ids_SN: NDArray[Any], *, where: str, samples: int | None = None, seed: int = 0) -> Sequences:
    """`samples` of these rows, drawn by `seed` and read in order, or all. Raises BadInput for fewer."""
    chosen = positions_drawn(len(ids_SN), samples, seed, where=where, noun=Sequences.noun)
    ids, digest = _identified(ids_SN, chosen)
    return Sequences(ids_SN=ids_SN, chosen=chosen, ids=ids, digest=digest)


def in_rows(ids_n: NDArray[Any], length: int, *, where: str) -> NDArray[Any]:
    """A stream of ids as whole rows [S,N]; what is left over at its end is dropped. Raises BadInput for no row."""
    count = len(ids_n) // length
    if not count:
        raise BadInput(
            f"{where}: {len(ids_n)} tokens, expected at least one sequence of {length}; give more text, or the model "
            "with shorter sequences (length)"
        )
    return ids_n[: count * length].reshape(count, length)


def open_ids(path: Path, *, length: int, vocabulary: int, samples: int | None = None, seed: int = 0) -> Sequences:
    """Token ids of a .npy, whole numbers [S, length], or one stream [n] that is cut into such rows; memory-mapped.

    Raises BadInput for a file that is missing or damaged, for other numbers, and for ids that the model doesn't know.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file, expected token ids ({SUFFIX})")
    array = array_from_npy(path, mapped=True)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != length):
        raise BadInput(
            f"{path}: got {array.dtype} {list(array.shape)}, expected whole numbers [sequences, {length}], or one "
            "stream of ids"
        )
    rows_SN = in_rows(array, length, where=str(path)) if array.ndim == 1 else array
    for start in range(0, len(rows_SN), _ROWS):
        part_SN = rows_SN[start : start + _ROWS]
        if part_SN.min() < 0 or part_SN.max() >= vocabulary:
            raise BadInput(
                f"{path}: ids from {part_SN.min()} to {part_SN.max()}, expected 0 to {vocabulary - 1}: those of the "
                "model's own tokenizer"
            )
    return sequences_of(rows_SN, where=str(path), samples=samples, seed=seed)
