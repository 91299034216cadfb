"""Images in a column of tables that Arrow reads: encoded pictures, or Hugging Face's struct with the field `bytes`."""

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput, Missing
from ground.file_kinds import refuse_stand_in_file
from ground.places import Place, open_file, reading

from .held import ForwardRows, Held, held_row
from .sources import Pictures, refuse_large

PREFERRED = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp", "bytes", "content")
"""The names of the column that is taken if several columns could hold images."""
PARTS_AT_ONCE = 4


def arrow(needed_by: object) -> Any:
    """Return the module pyarrow. Raises Missing, beginning with what needs it, if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise Missing(f"{needed_by}: pyarrow is not installed; pip install 'corp-deploy[data]'") from error
    return pyarrow


@contextmanager
def table_errors(place: Place, kind: str) -> Iterator[None]:
    with reading(place):
        try:
            yield
        except arrow(place).ArrowException as error:
            raise BadInput(f"{place}: not a valid {kind} ({' '.join(str(error).split())[:200]})") from None


@contextmanager
def opened_by_arrow(place: Place) -> Iterator[Any]:
    """Yield a file as Arrow reads it: mapped into memory, or by ranges from a URL."""
    pa = arrow(place)
    if isinstance(place, Path):
        refuse_stand_in_file(place)
        with pa.memory_map(str(place)) as source:
            yield source
    else:
        with open_file(place) as file, pa.PythonFile(file, "r") as source:
            yield source


def _holds_bytes(kind: Any) -> bool:
    types = arrow("images").types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _holds_images(kind: Any) -> bool:
    if arrow("images").types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type)
    return _holds_bytes(kind)


def label_columns(schema: Any) -> tuple[str, ...]:
    types = arrow("labels").types
    return tuple(each.name for each in schema if types.is_integer(each.type) or types.is_boolean(each.type))


def image_column(schema: Any, asked: str | None, *, where: Place | str) -> str:
    """Return the name of the column of images: `asked`, the only one that holds bytes, or the first of PREFERRED.

    Raises BadInput if there is no such column, and for several without such a name.
    """
    found: list[str] = [each.name for each in schema if _holds_images(each.type)]
    every = ", ".join(f"{each.name} ({str(each.type)[:60]})" for each in schema)[:500]
    if asked is not None:
        if asked not in found:
            raise BadInput(f"{where}: no column {asked!r} with bytes of images; its columns are {every or 'none'}")
        return asked
    if len(found) > 1:
        preferred = [name for name in PREFERRED if name in found]
        if not preferred:
            raise BadInput(
                f"{where}: each of the columns {', '.join(found)[:300]} may hold the images; name one behind the path: "
                f"'{where}#{found[0]}'"
            )
        return preferred[0]
    if not found:
        raise BadInput(
            f"{where}: no column of images; expected encoded pictures as bytes, or a struct with the field bytes, got "
            f"{every or 'no columns'}"
        )
    return found[0]


def bytes_of_column(array: Any) -> Iterator[bytes | None]:
    if arrow("images").types.is_struct(array.type):
        array = array.flatten()[array.type.get_field_index("bytes")]
    return (value.as_py() for value in array)


def present(content: bytes | None, where: str) -> bytes:
    """Return a picture's bytes. Raises BadInput for a null and for too many bytes."""
    if content is None:
        raise BadInput(f"{where}: holds no bytes (null), expected an encoded picture")
    refuse_large(len(content), where)
    return content


def class_indices(array: Any, column: str, where: object) -> NDArray[np.int64]:
    if array.null_count:
        raise BadInput(f"{where}: column {column} lacks {array.null_count} labels (null); give each image one")
    return np.asarray(array.to_numpy()).astype(np.int64)


class Part(NamedTuple):
    """Consecutive rows of a file that are read together: a row group, or a record batch at an offset.

    `first` is the number of the first row in its file, `start` its position among all rows.
    """

    file: int
    at: int
    first: int
    start: int
    rows: int


def parts_of_files(files: Iterable[Iterable[tuple[int, int]]]) -> tuple[Part, ...]:
    """Return the parts of files, each given by `at` and its number of rows."""
    parts, start = list[Part](), 0
    for number, own in enumerate(files):
        first = start
        for at, rows in own:
            parts.append(Part(number, at, start - first, start, rows))
            start += rows
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows(Pictures):
    """Images in the rows of files, called by `names` in messages. A part is read forward, a few rows at once."""

    files: tuple[Place, ...]
    names: tuple[str, ...]
    parts: tuple[Part, ...]
    column: str
    integers: tuple[str, ...]
    held: Held[ForwardRows[bytes | None]] = field(default_factory=Held, compare=False, repr=False)

    def arrays(self, part: Part, column: str) -> Iterator[Any]:
        """Yield the values of a column in a part as Arrow arrays. Raises BadInput for a damaged file."""
        raise NotImplementedError

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    def _row(self, position: int) -> tuple[int, int]:
        part = bisect_right(self.parts, position, key=lambda each: each.start) - 1
        return part, position - self.parts[part].start

    def name(self, position: int) -> str:
        part, row = self._row(position)
        return f"{self.names[self.parts[part].file]} row {self.parts[part].first + row}"

    def where(self, position: int) -> str:
        part, row = self._row(position)
        return f"{self.files[self.parts[part].file]} row {self.parts[part].first + row}"

    def _contents(self, part: int) -> Iterator[bytes | None]:
        for array in self.arrays(self.parts[part], self.column):
            yield from bytes_of_column(array)

    def content(self, position: int) -> bytes:
        where, (part, row) = self.where(position), self._row(position)
        try:
            content = held_row(self.held, part, row, self._contents)
        except IndexError:
            raise BadInput(f"{where}: the file has fewer rows than its header says") from None
        return present(content, where)

    def hashes(self, positions: Sequence[int]) -> Sequence[bytes]:
        """Read each part once, and return the SHA-256 of each image, that of no bytes for one that can't be read."""
        wanted = defaultdict[int, set[int]](set)
        for position in positions:
            part, row = self._row(position)
            wanted[part].add(row)
        with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            found = dict(zip(wanted, pool.map(self._hashes_of_part, wanted, wanted.values()), strict=True))
        empty = hashlib.sha256(b"").digest()
        return [found[part].get(row, empty) for part, row in map(self._row, positions)]

    def _hashes_of_part(self, part: int, wanted: set[int]) -> dict[int, bytes]:
        found, last = dict[int, bytes](), max(wanted)
        try:
            for row, content in enumerate(self._contents(part)):
                if row in wanted:
                    found[row] = hashlib.sha256(content or b"").digest()
                if row == last:
                    break
        except BadInput:  # the rows behind are counted as bad images when they are read
            pass
        return found

    @property
    def label_columns(self) -> Sequence[str]:
        return self.integers

    def labels(self, column: str) -> NDArray[np.int64]:
        return np.concatenate(
            [
                class_indices(arrow(column).chunked_array([array]), column, self.files[part.file])
                for part in self.parts
                for array in self.arrays(part, column)
            ]
        )
