"""Tar shards that are compressed or behind a URL, read forward; each is read once to be listed and identified."""

import bz2
import gzip
import hashlib
import lzma
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput, Missing
from ground.pictures import Skips, sample_key, select_pictures
from ground.places import Place, open_file, places_from_pattern, reading

from .held import Held, held_row
from .image_arrays import ImageShape
from .shards import (
    LABELS,
    LONGEST_LABEL,
    Member,
    TarPictures,
    bad_tar,
    class_index,
    members_of_stream,
    refuse_long_header,
)
from .sources import EXPECTED, MOST_BYTES, Transform, refuse_large
from .tables import arrow

_PACKED: Mapping[str, str] = {
    ".tar.gz": "gzip", ".tgz": "gzip", ".tar.bz2": "bzip2", ".tbz2": "bzip2", ".tar.xz": "xz", ".txz": "xz",
    ".tar.zst": "zstd",
}  # fmt: skip
SUFFIXES = (".tar", *_PACKED)
SHARDS_AT_ONCE = 4
_CHUNK = 2**20


def packing_of(place: Place) -> str | None:
    """Return the name of the compression of a tar shard by its suffix, None if uncompressed."""
    return next((kind for suffix, kind in _PACKED.items() if place.name.lower().endswith(suffix)), None)


def _unpacked(file: IO[bytes], packing: str | None) -> Any:
    match packing:
        case "gzip":
            return gzip.open(file)
        case "bzip2":
            return bz2.open(file)
        case "xz":
            return lzma.open(file)
        case "zstd":
            return arrow("zstd").CompressedInputStream(file, "zstd")
    return file


class _Forward:
    """A stream that tarfile can read: `seek` passes over bytes, or goes back into the block that was read last."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._at = 0
        self._last = b""
        self._again = b""

    def tell(self) -> int:
        return self._at

    def content(self, size: int) -> bytes:
        parts = [self._again[:size]]
        self._again = self._again[size:]
        left = size - len(parts[0])
        while left and (part := self._stream.read(min(left, _CHUNK))):
            parts.append(part)
            left -= len(part)
        self._at += size - left
        return b"".join(parts)

    def read(self, size: int | None = -1, /) -> bytes:
        refuse_long_header(size)
        self._last = self.content(cast(int, size))
        return self._last

    def seek(self, position: int) -> None:
        back = self._at - position
        if back > 0:
            assert back <= len(self._last), (back, self._last)
            self._again, self._at = self._last[-back:] + self._again, position
        while self._at < position and self.content(min(position - self._at, _CHUNK)):
            pass


@contextmanager
def _tar_errors(shard: Place) -> Iterator[None]:
    kind = packing_of(shard)
    try:
        with reading(shard):
            try:
                yield
            except OSError as error:
                if error.errno is not None:
                    raise
                raise ValueError(error) from None  # of a decompressor, not of the system
    except (BadInput, Missing, MemoryError):
        raise
    except Exception as error:  # each decompressor raises its own errors
        raise bad_tar(shard, str(error)[:100], f"tar packed by {kind}" if kind else "tar") from None


def _walk(shard: Place) -> Iterator[tuple[Member, _Forward]]:
    """Yield each regular file of a shard and the stream, which stands at the file's content; any error passes."""
    with open_file(shard) as file:
        stream = _Forward(_unpacked(file, packing_of(shard)))
        for member in members_of_stream(cast(IO[bytes], stream), shard, None):
            yield member, stream


class _Listed(NamedTuple):
    """A member of a shard with the SHA-256 of a picture that isn't too large, or the text of a label."""

    member: Member
    sha256: bytes
    label: bytes | None


def _content(member: Member, stream: _Forward) -> bytes:
    content = stream.content(member.size)
    if len(content) < member.size:
        raise bad_tar(member.shard, f"{member.name[:100]!r} is cut short", "tar")
    return content


def _listed(shard: Place) -> list[_Listed]:
    listed = []
    with _tar_errors(shard):
        for member, stream in _walk(shard):
            sha256, label = hashlib.sha256(b"").digest(), None
            if member.name.endswith(f".{LABELS}"):
                label = stream.content(min(member.size, LONGEST_LABEL))
            elif member.size <= MOST_BYTES and select_pictures([member.name], Skips()):
                sha256 = hashlib.sha256(_content(member, stream)).digest()
            listed.append(_Listed(member, sha256, label))
    return listed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedShards(TarPictures):
    """Pictures in shards, their content hashes [N] and labels, if any.

    Uncompressed shards are read at any position; compressed ones forward, and again from the beginning to go back.
    """

    shards: tuple[Place, ...]
    firsts: tuple[int, ...]
    """The position of each shard's first picture."""
    digests: tuple[bytes, ...]
    classes: tuple[bytes | None, ...]
    held: Held[Any] = field(default_factory=Held, compare=False, repr=False)

    def hashes(self, positions: Sequence[int]) -> Sequence[bytes]:
        return [self.digests[position] for position in positions]

    @property
    def label_columns(self) -> Sequence[str]:
        return (LABELS,) if any(label is not None for label in self.classes) else ()

    def labels(self, column: str) -> NDArray[np.int64]:
        values = [class_index(text, self.where(position)) for position, text in enumerate(self.classes)]
        return np.array(values, dtype=np.int64)

    def content(self, position: int) -> bytes:
        member = self.members[position]
        refuse_large(member.size, member.where)
        if packing_of(member.shard) is not None:
            shard = bisect_right(self.firsts, position) - 1
            unpacked: bytes = held_row(self.held, shard, position - self.firsts[shard], self._contents)
            return unpacked
        with reading(member.shard):
            file = self.held.get(member.shard, lambda: open_file(member.shard))
            file.seek(member.offset)
            content: bytes = file.read(member.size)
        if len(content) < member.size:
            raise BadInput(f"{member.where}: has {len(content)} bytes, expected {member.size}; the shard was changed")
        return content

    def _contents(self, shard: int) -> Iterator[bytes]:
        chosen = {member.offset for member in self.members[self.firsts[shard] :] if member.shard == self.shards[shard]}
        with _tar_errors(self.shards[shard]):
            for member, stream in _walk(self.shards[shard]):
                if member.offset in chosen:
                    yield b"" if member.size > MOST_BYTES else _content(member, stream)


def streamed_shards(pattern: Place, *, shape: ImageShape, transform: Transform) -> StreamedShards:
    """Open shards, `x.tar.gz` or `x-{000..099}.tar.gz`, packed or not, of files or URLs.

    Raises BadInput for a missing or damaged shard, and Missing for zstd without pyarrow.
    """
    shards, skips, firsts = places_from_pattern(pattern), Skips(), list[int]()
    pictures, classes = list[_Listed](), list[bytes | None]()
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        for every in pool.map(_listed, shards):
            chosen = set(select_pictures((each.member.name for each in every), skips))
            labels = {sample_key(each.member.name): each.label for each in every if each.label is not None}
            own = [each for each in every if each.member.name in chosen]
            firsts.append(len(pictures))
            pictures += own
            classes += [labels.get(sample_key(each.member.name)) for each in own]
    if not pictures:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{pattern}: no images in it{left_out}, {EXPECTED}")
    return StreamedShards(
        shards=tuple(shards),
        firsts=tuple(firsts),
        members=tuple(each.member for each in pictures),
        digests=tuple(each.sha256 for each in pictures),
        classes=tuple(classes),
        shape=shape,
        transform=transform,
        skipped=skips.line,
    )
