"""Sequences of token ids, all of one length: rows of an array, in memory or mapped, identified by content.

Shapes: S sequences, N tokens of each.
"""

from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from ground.arrays import array_from_npy
from ground.errors import BadInput

from .rows import Rows

NAME = "input_ids"
SUFFIX = ".npy"
_ROWS = 1024  # read at once where a file is checked


class Sequences(Rows):
    """Rows of ids, [B,N] int64 under `input_ids`, whatever type they are kept in."""

    __slots__ = ()
    noun: ClassVar[str] = "sequences"
    as_int64: ClassVar[bool] = True


def sequences_of(ids_SN: NDArray[Any], *, where: str, samples: int | None = None, seed: int = 0) -> Sequences:
    """`samples` of these rows, drawn by `seed` and read in order, or all. Raises BadInput for fewer."""
    return Sequences.sampled({NAME: ids_SN}, where=where, samples=samples, seed=seed)


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
