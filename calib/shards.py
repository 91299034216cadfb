"""Images inside webdataset tar shards, read at any position without unpacking.

No link is followed, and every member has to lie within the file, so that reading ends.
"""

import io
import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in_file
from ground.files import escapes_directory, regular_file
from ground.pictures import Skips, select_pictures

from .image_arrays import ImageShape
from .sources import EXPECTED, Pictures, Transform, refuse_large

LONGEST_HEADER = 2**20


class Member(NamedTuple):
    shard: Path
    name: str
    offset: int
    size: int

    @property
    def where(self) -> str:
        return f"{self.shard}/{self.name}"


def _bad_tar(path: Path, why: str) -> BadInput:
    return BadInput(f"{path}: not a valid uncompressed tar file ({why})")


class _Headers(io.FileIO):
    """A shard file whose `read` raises HeaderError for more than LONGEST_HEADER bytes at once."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LONGEST_HEADER:
            raise tarfile.HeaderError(f"a header of {size} bytes, expected {LONGEST_HEADER} at most")
        return super().read(size)


def _require_regular_member(path: Path, info: tarfile.TarInfo) -> None:
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
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8")
            while (info := tar.next()) is not None:
                remaining = file_size - info.offset_data
                if not 0 <= info.size <= remaining:
                    raise _bad_tar(
                        path, f"{info.name[:100]!r} has {info.size} bytes, and {remaining} are left of the file"
                    )
                _require_regular_member(path, info)
                if info.isreg():
                    yield Member(path, info.name, info.offset_data, info.size)
            file.seek(tar.offset)
            block = file.read(tarfile.BLOCKSIZE)
        except BadInput:
            raise
        except (tarfile.TarError, ValueError, RecursionError) as error:
            raise _bad_tar(path, str(error)[:100]) from None
        if len(block) < tarfile.BLOCKSIZE or any(block):  # tarfile stops at a damaged header without an error
            raise _bad_tar(path, "it is cut short" if len(block) < tarfile.BLOCKSIZE else "a header is damaged")


MOST_SHARDS = 100_000
_RANGE = re.compile(r"\{([0-9]{1,12})\.\.([0-9]{1,12})\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Pictures):
    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, position: int) -> str:
        member = self.members[position]
        return f"{member.shard.name}/{member.name}"

    def where(self, position: int) -> str:
        return self.members[position].where

    def content(self, position: int) -> bytes:
        member = self.members[position]
        refuse_large(member.size, member.where)
        try:
            with member.shard.open("rb") as file:
                return os.pread(file.fileno(), member.size, member.offset)
        except OSError as error:
            raise BadInput(f"{member.shard}: can't be read ({error.strerror})") from error


def paths_from_pattern(pattern: str) -> list[Path]:
    """Expand `shards-{000..099}.tar` to a hundred paths; numbers are as wide as the first one."""
    parts = _RANGE.split(pattern)
    literals, ranges, count = parts[::3], [], 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if int(first) > int(last):
            raise BadInput(f"{pattern}: range {first}..{last} runs backwards")
        count *= int(last) - int(first) + 1
        if count > MOST_SHARDS:
            raise BadInput(f"{pattern}: {count} shards, expected {MOST_SHARDS} at most")
        ranges.append([str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)])
    woven = [
        "".join(itertools.chain(*zip(literals, (*numbers, ""), strict=True))) for numbers in itertools.product(*ranges)
    ]
    return [Path(text) for text in woven]


def _members_of(shard: Path, skips: Skips) -> list[Member]:
    try:
        members = list(members_of_tar(shard))
    except FileNotFoundError as error:
        raise BadInput(f"{shard}: no such shard") from error
    except OSError as error:
        raise BadInput(f"{shard}: can't be read ({error.strerror})") from error
    chosen = set(select_pictures((member.name for member in members), skips))
    return [member for member in members if member.name in chosen]


def shards_from_pattern(pattern: str, *, shape: ImageShape, transform: Transform) -> Shards:
    """Open `x.tar` or `x-{000..099}.tar`, reading only headers. Raises BadInput for a missing or damaged shard."""
    skips = Skips()
    members = [member for path in paths_from_pattern(pattern) for member in _members_of(path, skips)]
    if not members:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{pattern}: no images in it{left_out}, {EXPECTED}")
    return Shards(members=tuple(members), shape=shape, transform=transform, skipped=skips.line)
