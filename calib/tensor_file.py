"""Safetensors files that are written tensor by tensor, so that memory holds one tensor at a time."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.files import replacing

_COPIED = 2**22  # bytes that are copied at a time
_LENGTH = struct.Struct("<Q")  # the header's length in bytes, with which a safetensors file begins
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor of a file; `pieces` yields its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: Callable[[], Iterable[bytes | memoryview]]


def _pieces_of_file(path: Path, start: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while size:
            piece = file.read(min(size, _COPIED))
            if not piece:
                raise BadInput(f"{path}: cut off; run calibrate again")
            yield piece
            size -= len(piece)


def entries_of_file(path: Path) -> dict[str, TensorEntry]:
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        layout: dict[str, Any] = json.loads(file.read(length))
    layout.pop(_METADATA, None)
    entries = dict[str, TensorEntry]()
    for name, entry in layout.items():
        first, last = entry["data_offsets"]
        pieces = partial(_pieces_of_file, path, _LENGTH.size + length + first, last - first)
        entries[name] = TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"]), size=last - first, pieces=pieces)
    return entries


def write_tensors(path: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
    layout: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, entry in entries.items():
        layout[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [end, end := end + entry.size]}
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, temporary.open("wb") as written:
        written.write(_LENGTH.pack(len(text)) + text)
        for entry in entries.values():
            for piece in entry.pieces():
                written.write(piece)
