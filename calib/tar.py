"""The headers of an uncompressed tar file, one after the other: what each member is called and where its bytes lie.

Nothing is unpacked and no link followed. Every step goes forward and ends within the file, so that reading ends too.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ground.errors import BadInput
from ground.files import leaves, regular

BLOCK = tarfile.BLOCKSIZE
LONGEST_NOTE = 2**20
_LONG_NAME, _LONG_LINK, _NOTE, _NOTE_FOR_ALL = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE
)  # fmt: skip
_NOTES = (_LONG_NAME, _LONG_LINK, _NOTE, _NOTE_FOR_ALL, tarfile.SOLARIS_XHDTYPE)
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=\n]+)=")
_NUMBER = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A regular file inside: `size` bytes at `offset`."""

    name: str
    offset: int
    size: int


def _refused(path: Path, why: str) -> BadInput:
    return BadInput(f"{path}: not a whole uncompressed tar file ({why})")


def _header(path: Path, file: IO[bytes]) -> tarfile.TarInfo | None:
    """The next header, None at the end."""
    block = file.read(BLOCK)
    if len(block) == BLOCK and not any(block):
        return None
    if len(block) < BLOCK:
        raise _refused(path, "it is cut short")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise _refused(path, str(error)[:100]) from None


def _noted(path: Path, content: bytes) -> dict[str, str]:
    """The records of an extended header: each begins with its own length."""
    noted, at = dict[str, str](), 0
    while at < len(content) and content[at]:
        record = _RECORD.match(content, at)
        end = at + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content):
            raise _refused(path, "an extended header is broken")
        noted[record[2].decode("utf-8", "replace")] = content[record.end() : end - 1].decode("utf-8", "surrogateescape")
        at = end
    return noted


def _note(path: Path, file: IO[bytes], info: tarfile.TarInfo) -> dict[str, str]:
    """What a header says of the next member."""
    if info.size > LONGEST_NOTE:
        raise _refused(path, f"a header of {info.size} bytes, expected {LONGEST_NOTE} at most")
    content = file.read(info.size)
    if info.type == _LONG_NAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    return _noted(path, content) if info.type in (_NOTE, tarfile.SOLARIS_XHDTYPE) else {}


def _size(path: Path, info: tarfile.TarInfo, noted: dict[str, str], left: int) -> int:
    """Of a member that has so many bytes of the file behind its header."""
    text = noted.get("size", str(info.size))
    if not _NUMBER.fullmatch(text) or int(text) > left:
        raise _refused(path, f"{info.name[:100]!r} has {text[:25]} bytes, and {left} are left of the file")
    return int(text)


def _require_plain(path: Path, info: tarfile.TarInfo, name: str, noted: dict[str, str]) -> None:
    """Raise BadInput for links, devices, files with holes, and names that lead out of the archive."""
    if info.type not in (*_FILES, tarfile.DIRTYPE) or any(key.startswith("GNU.sparse") for key in noted):
        raise BadInput(f"{path}: its member {name[:100]!r} is a link, a device or sparse; expected regular files alone")
    if leaves(name):
        raise BadInput(f"{path}: its member {name[:100]!r} has a path that leaves the archive")


def members_of_tar(path: Path) -> Iterator[TarMember]:
    """The regular files in their order. Raises BadInput for a file that is no whole tar, and as _require_plain does."""
    whole = regular(path).stat().st_size
    noted = dict[str, str]()
    with path.open("rb") as file:
        while (info := _header(path, file)) is not None:
            at = file.tell()
            size = _size(path, info, noted if info.type not in _NOTES else {}, whole - at)
            if info.type in _NOTES:
                noted |= _note(path, file, info)
            else:
                name = noted.get("path", info.name)
                _require_plain(path, info, name, noted)
                if info.type in _FILES:
                    yield TarMember(name=name, offset=at, size=size)
                noted = {}
            file.seek(at + -(-size // BLOCK) * BLOCK)
