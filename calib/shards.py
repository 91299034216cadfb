"""Images inside webdataset tar shards, read at any position without unpacking.

No link is followed, and every member has to lie within the file, so that reading ends.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in_file
from ground.files import escapes_directory, regular_file
from ground.pictures import Skips, sample_key, select_pictures
from ground.places import Place, places_from_pattern, reading

from .image_arrays import ImageShape
from .sources import EXPECTED, Pictures, Transform, refuse_large

LONGEST_HEADER = 2**20
LONGEST_LABEL = 64
LABELS = "cls"
"""The suffix of members with a class index, which webdataset keeps beside the picture of the same name."""


class Member(NamedTuple):
    shard: Place
    name: str
    offset: int
    size: int

    @property
    def where(self) -> str:
        return f"{self.shard}/{self.name}"


def bad_tar(path: Place, why: str, kind: str = "uncompressed tar") -> BadInput:
    return BadInput(f"{path}: not a valid {kind} file ({why})")


def refuse_long_header(size: int | None) -> None:
    if size is None or not 0 <= size <= LONGEST_HEADER:
        raise tarfile.HeaderError(f"a header of {size} bytes, expected {LONGEST_HEADER} at most")


class _Headers(io.FileIO):
    """A shard file whose `read` raises HeaderError for more than LONGEST_HEADER bytes at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        refuse_long_header(size)
        return super().read(size)


def _require_regular_member(path: Place, info: tarfile.TarInfo) -> None:
    """Raise BadInput for links, devices, files with holes, and names that lead out of the archive."""
    is_sparse = info.issparse() or any(key.startswith("GNU.sparse") for key in info.pax_headers)
    if is_sparse or not (info.isreg() or info.isdir()):
        raise BadInput(
            f"{path}: its member {info.name[:100]!r} is a link, a device or sparse; expected only regular files"
        )
    if escapes_directory(info.name):
        raise BadInput(f"{path}: its member {info.name[:100]!r} has a path that leaves the archive")


def members_of_tar(path: Path) -> Iterator[Member]:
    """Yield the regular files in their order.

    Raises BadInput for a file that is no complete tar, and for members that _require_regular_member refuses.
    """
    refuse_stand_in_file(path)
    file_size = regular_file(path).stat().st_size
    with _Headers(path) as file:
        try:
            yield from members_of_stream(file, path, file_size)
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise error if isinstance(error, BadInput) else bad_tar(path, str(error)[:100]) from None


def members_of_stream(file: IO[bytes], path: Place, file_size: int | None) -> Iterator[Member]:
    """Yield the regular files of a tar that is read forward; tarfile's errors pass. `file_size` is None if unknown."""
    tar = tarfile.TarFile(fileobj=file, encoding="utf-8")
    while (info := tar.next()) is not None:
        remaining = info.size if file_size is None else file_size - info.offset_data
        if not 0 <= info.size <= remaining:
            raise bad_tar(path, f"{info.name[:100]!r} has {info.size} bytes, and {remaining} are left of the file")
        _require_regular_member(path, info)
        if info.isreg():
            yield Member(path, info.name, info.offset_data, info.size)
    file.seek(tar.offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE or any(block):  # tarfile stops at a damaged header without an error
        raise bad_tar(path, "it is cut short" if len(block) < tarfile.BLOCKSIZE else "a header is damaged")


def class_index(content: bytes | None, where: str) -> int:
    """Return the whole number in a label's file. Raises BadInput for None, no such file, and for other contents."""
    if content is None:
        raise BadInput(f"{where}: no member of the same name with the suffix .{LABELS}; give each image one")
    try:
        return int(content)
    except ValueError:
        raise BadInput(f"{where}: its .{LABELS} is {content[:60]!r}, expected a class index") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TarPictures(Pictures):
    """Base of pictures that are members of tar shards."""

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, position: int) -> str:
        member = self.members[position]
        return f"{member.shard.name}/{member.name}"

    def where(self, position: int) -> str:
        return self.members[position].where


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(TarPictures):
    classes: Mapping[str, Member]
    """Members with class indices, by the shard and the name that they share with their picture."""

    @property
    def label_columns(self) -> Sequence[str]:
        return (LABELS,) if self.classes else ()

    def labels(self, column: str) -> NDArray[np.int64]:
        found = (self.classes.get(sample_key(member.where)) for member in self.members)
        texts = (each and _content(each._replace(size=min(each.size, LONGEST_LABEL))) for each in found)
        values = [class_index(text, each.where) for text, each in zip(texts, self.members, strict=True)]
        return np.array(values, dtype=np.int64)

    def content(self, position: int) -> bytes:
        member = self.members[position]
        refuse_large(member.size, member.where)
        return _content(member)


def _content(member: Member) -> bytes:
    with reading(member.shard), cast(Path, member.shard).open("rb") as file:
        return os.pread(file.fileno(), member.size, member.offset)


def _members_of(shard: Place) -> list[Member]:
    try:
        return list(members_of_tar(cast(Path, shard)))
    except FileNotFoundError as error:
        raise BadInput(f"{shard}: no such shard") from error
    except OSError as error:
        raise BadInput(f"{shard}: can't be read ({error.strerror})") from error


def shards_from_pattern(pattern: Place | str, *, shape: ImageShape, transform: Transform) -> Shards:
    """Open `x.tar` or `x-{000..099}.tar`, reading only headers. Raises BadInput for a missing or damaged shard."""
    skips, members, classes = Skips(), list[Member](), dict[str, Member]()
    for shard in places_from_pattern(pattern):
        every = _members_of(shard)
        chosen = set(select_pictures((member.name for member in every), skips))
        members += [member for member in every if member.name in chosen]
        classes |= {sample_key(each.where): each for each in every if each.name.endswith(f".{LABELS}")}
    if not members:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{pattern}: no images in it{left_out}, {EXPECTED}")
    return Shards(members=tuple(members), classes=classes, shape=shape, transform=transform, skipped=skips.line)
