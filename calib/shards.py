"""Images inside webdataset tar shards, read at random positions without unpacking.

Headers are read one after the other, and no link is followed. Every step goes forward and ends within the file, so that
reading ends too.
"""

import itertools
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in_file
from ground.files import escapes_directory, regular_file
from ground.pictures import Skips, select_pictures

from .image_arrays import ImageShape
from .sources import EXPECTED, Pictures, Transform, refuse_large

BLOCK = tarfile.BLOCKSIZE
LONGEST_NOTE = 2**20
_LONG_NAME, _LONG_LINK, _NOTE, _NOTE_FOR_ALL = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE
)  # fmt: skip
_NOTES = (_LONG_NAME, _LONG_LINK, _NOTE, _NOTE_FOR_ALL, tarfile.SOLARIS_XHDTYPE)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=\n]+)=")
_NUMBER = re.compile(r"[0-9]{1,19}")


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


def _header(path: Path, file: IO[bytes]) -> tarfile.TarInfo | None:
    """The next header, None at the end."""
    block = file.read(BLOCK)
    if len(block) == BLOCK and not any(block):
        return None
    if len(block) < BLOCK:
        raise _bad_tar(path, "it is cut short")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise _bad_tar(path, str(error)[:100]) from None


def _pax_records(path: Path, content: bytes) -> dict[str, str]:
    """The records of an extended header: each begins with its own length."""
    records, at = dict[str, str](), 0
    while at < len(content) and content[at]:
        record = _RECORD.match(content, at)
        end = at + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content):
            raise _bad_tar(path, "an extended header is broken")
        records[record[2].decode("utf-8", "replace")] = content[record.end() : end - 1].decode(
            "utf-8", "surrogateescape"
        )
        at = end
    return records


def _extension_records(path: Path, file: IO[bytes], info: tarfile.TarInfo) -> dict[str, str]:
    """What a header says of the next member."""
    if info.size > LONGEST_NOTE:
        raise _bad_tar(path, f"a header of {info.size} bytes, expected {LONGEST_NOTE} at most")
    content = file.read(info.size)
    if info.type == _LONG_NAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    return _pax_records(path, content) if info.type in (_NOTE, tarfile.SOLARIS_XHDTYPE) else {}


def _size(path: Path, info: tarfile.TarInfo, records: dict[str, str], remaining: int) -> int:
    """Of a member that has so many bytes of the file behind its header."""
    text = records.get("size", str(info.size))
    if not _NUMBER.fullmatch(text) or int(text) > remaining:
        raise _bad_tar(path, f"{info.name[:100]!r} has {text[:25]} bytes, and {remaining} are left of the file")
    return int(text)


def _require_regular_member(path: Path, info: tarfile.TarInfo, name: str, records: dict[str, str]) -> None:
    """Raise BadInput for links, devices, files with holes, and names that lead out of the archive."""
    if info.type not in (*_FILES, tarfile.DIRTYPE) or any(key.startswith("GNU.sparse") for key in records):
        raise BadInput(f"{path}: its member {name[:100]!r} is a link, a device or sparse; expected regular files alone")
    if escapes_directory(name):
        raise BadInput(f"{path}: its member {name[:100]!r} has a path that leaves the archive")


def members_of_tar(path: Path) -> Iterator[Member]:
    """The regular files in their order. Raises BadInput for a file that is no whole tar, and as
    _require_regular_member does."""
    refuse_stand_in_file(path)
    file_size = regular_file(path).stat().st_size
    records = dict[str, str]()
    with path.open("rb") as file:
        while (info := _header(path, file)) is not None:
            at = file.tell()
            size = _size(path, info, records if info.type not in _NOTES else {}, file_size - at)
            if info.type in _NOTES:
                records |= _extension_records(path, file, info)
            else:
                name = records.get("path", info.name)
                _require_regular_member(path, info, name, records)
                if info.type in _FILES:
                    yield Member(path, name, at, size)
                records = {}
            file.seek(at + -(-size // BLOCK) * BLOCK)


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
    """`shards-{000..099}.tar` -> a hundred paths; the width of the first number is kept."""
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
    """Opens `x.tar` or `x-{000..099}.tar`; reads only the headers. Raises BadInput for a missing or damaged shard."""
    skips = Skips()
    members = [member for path in paths_from_pattern(pattern) for member in _members_of(path, skips)]
    if not members:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{pattern}: no images in it{left_out}, {EXPECTED}")
    return Shards(members=tuple(members), shape=shape, transform=transform, skipped=skips.line)
