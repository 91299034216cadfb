"""Inputs from rows of named arrays: an array for each port, or sequences of token ids.

Shapes: S sequences, N tokens of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ground.arrays import array_from_npy, arrays_from_npz, arrays_from_safetensors
from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, checked_feeds, feeds_of_ports, shape_text
from ground.ports import Port

from .inputs import IndexedInputs

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayInputs(IndexedInputs):
    """Inputs that are rows of named arrays of one length; `as_int64` converts whole numbers to int64."""

    noun: ClassVar[str] = "inputs"
    as_int64: ClassVar[bool] = False

    arrays: Arrays

    def example(self) -> Mapping[str, Tensor]:
        return self._rows(range(1))

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        places = [self.places[position] for position in positions]
        return {
            name: torch.from_numpy(self._converted(np.stack([array[place] for place in places])))
            for name, array in self.arrays.items()
        }

    def _converted(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows.astype(np.int64) if self.as_int64 else rows

    def _hashes(self, places: Sequence[int]) -> list[bytes]:

        def content(place: int) -> bytes:
            rows = (self._converted(array[place]) for array in self.arrays.values())
            return b"".join(row.astype(row.dtype.newbyteorder("<")).tobytes() for row in rows)

        return [sha256(content(place)).digest() for place in places]


NAME = "input_ids"
SUFFIX = ".npy"
_ROWS = 1024  # rows whose values are checked at a time


class Sequences(ArrayInputs):
    noun: ClassVar[str] = "sequences"
    as_int64: ClassVar[bool] = True


def sample_sequences(ids_SN: NDArray[Any], *, where: str, samples: int | None = None, seed: int = 0) -> Sequences:
    """Return `samples` of the rows, drawn by `seed`, in their order; all for None. Raises BadInput for too few."""
    return Sequences(available=len(ids_SN), arrays={NAME: ids_SN}).sampled(samples, seed, where=where)


def cut_into_rows(ids_n: NDArray[Any], length: int, *, where: str) -> NDArray[Any]:
    count = len(ids_n) // length
    if not count:
        raise BadInput(
            f"{where}: {len(ids_n)} tokens, expected at least one sequence of {length}; give more text, or the model "
            "with shorter sequences (length)"
        )
    return ids_n[: count * length].reshape(count, length)


def open_ids(path: Path, *, length: int, vocabulary: int, samples: int | None = None, seed: int = 0) -> Sequences:
    """Open token ids of a .npy file: whole numbers [S, length], or one stream [n]; memory-mapped.

    Raises BadInput for a missing or damaged file, other numbers, and ids outside the vocabulary.
    """
    if not path.exists():
        raise BadInput(f"{path}: no such file, expected token ids ({SUFFIX})")
    array = array_from_npy(path, mapped=True)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != length):
        raise BadInput(
            f"{path}: got {array.dtype} {list(array.shape)}, expected whole numbers [sequences, {length}], or one "
            "stream of ids"
        )
    rows_SN = cut_into_rows(array, length, where=str(path)) if array.ndim == 1 else array
    refuse_ids(rows_SN, vocabulary, where=f"{path}: ids", of="those of the model's own tokenizer")
    return sample_sequences(rows_SN, where=str(path), samples=samples, seed=seed)


SUFFIXES = (".npz", ".safetensors", ".npy")


def open_arrays(
    path: Path, ports: Sequence[Port], *, id_counts: Mapping[str, int], samples: int | None = None, seed: int = 0
) -> ArrayInputs:
    """Open an array [N, *shape] for each port by name (.npz, .safetensors), or a .npy for one port.

    `id_counts`: the number of ids, for ports of ids. Raises BadInput for arrays that are missing or don't fit, for NaN
    and Inf, and for unknown ids.
    """
    arrays = checked_feeds(feeds_of_ports(_arrays(path, ports), ports), ports, where=str(path))
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not all(np.isfinite(part).all() for part in _parts(array)):
            raise BadInput(f"{path}: {name}: holds NaN or Inf, expected finite values")
        if name in id_counts:
            where, of = f"{path}: {name}: numbers", "rows of the table that the model looks them up in"
            refuse_ids(array, id_counts[name], where=where, of=of)
    return ArrayInputs(available=batch_size(arrays), arrays=arrays).sampled(samples, seed, where=path)


def _arrays(path: Path, ports: Sequence[Port]) -> Feeds:
    ports_text = ", ".join(f"{port.name} {shape_text(port)} {port.dtype}" for port in ports).replace("[B", "[N")
    expected = f"expected {' or '.join(SUFFIXES)} with {ports_text}"
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise BadInput(f"{path}: {'a file of another kind' if path.exists() else 'no such file'}, {expected}")
    if path.suffix == ".npz":
        return arrays_from_npz(path)
    if path.suffix == ".safetensors":
        return arrays_from_safetensors(path)
    if len(ports) > 1:
        raise BadInput(f"{path}: one array, {expected}")
    return {ports[0].name: array_from_npy(path, mapped=True)}


def _parts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (array[start : start + _ROWS] for start in range(0, len(array), _ROWS))


def refuse_ids(array: NDArray[Any], count: int, *, where: str, of: str) -> None:
    for part in _parts(array):
        if part.min() < 0 or part.max() >= count:
            raise BadInput(f"{where} from {part.min()} to {part.max()}, expected 0 to {count - 1}: {of}")
