"""Readers of untrusted NumPy and safetensors files.

A header is checked against the size of its file before memory is allocated. Nothing is unpickled, and the inflated size
of an archive is bounded.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import safe_open

from .errors import BadInput
from .file_kinds import refuse_stand_in_file
from .files import escapes_directory

LONGEST_HEADER = 4096
# An archive may inflate to FREE_BYTES, or to MOST_INFLATED times the size of its file if that is more.
FREE_BYTES = 2**28
MOST_INFLATED = 100
_LARGEST = 2**63 - 1
_KINDS = "biufcmMSU"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_PREFIXES = {(1, 0): "<H", (2, 0): "<I"}
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def _damaged(where: str, kind: str, reason: object) -> BadInput:
    return BadInput(f"{where}: not a valid {kind} file ({reason!s:.200})")


def _read_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], "np.dtype[Any]", int]:
    """Return the shape and type of a .npy file's array, and the size of the file's header in bytes."""
    magic = file.read(npy.MAGIC_LEN)
    try:
        version = npy.read_magic(io.BytesIO(magic))
        prefix = _PREFIXES[version]
        size = struct.calcsize(prefix)
        head = file.read(size)
        (length,) = struct.unpack(prefix, head)
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes, expected {LONGEST_HEADER} at most")
        text = file.read(length)
        shape, _, dtype = _READERS[version](io.BytesIO(head + text), max_header_size=LONGEST_HEADER)
    except KeyError:
        raise _damaged(where, ".npy", f"version {magic[6:8]!r} of the format, expected 1.0 or 2.0") from None
    except Exception as error:  # a header nested too deep raises errors of Python's parser, MemoryError too
        raise _damaged(where, ".npy", error or type(error).__name__) from None
    return shape, dtype, len(magic) + size + length


def _require_held(file: IO[bytes], size_bytes: int, where: str) -> None:
    """Raise BadInput unless a .npy header describes plain numbers or texts that fit in `size_bytes`."""
    shape, dtype, start = _read_header(file, where)
    if dtype.hasobject:
        raise BadInput(f"{where}: holds pickled objects, which are never loaded; expected numbers")
    if dtype.kind not in _KINDS or dtype.subdtype is not None:
        raise BadInput(f"{where}: holds {str(dtype)[:100]}, expected plain numbers or texts")
    if any(not 0 <= size <= _LARGEST for size in shape):
        raise BadInput(f"{where}: its header says {str(list(shape))[:200]}, which is not a valid shape")
    needed = math.prod(shape) * dtype.itemsize
    if needed > size_bytes - start:
        raise BadInput(
            f"{where}: not a valid .npy file: its header says {str(list(shape))[:200]} {dtype}, {needed} bytes, "
            f"and {max(size_bytes - start, 0)} are there"
        )


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Raise BadInput for an empty file, LFS pointer or web page, and any error but MemoryError, FileNotFoundError."""
    refuse_stand_in_file(path)
    try:
        if not path.stat().st_size:
            raise _damaged(str(path), kind, "the file is empty")
        yield
    except (BadInput, MemoryError, FileNotFoundError):
        raise
    except Exception as error:
        raise _damaged(str(path), kind, f"{type(error).__name__}: {error}") from error


def array_from_npy(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Return the array of a .npy file, read or, if `mapped`, mapped into memory.

    Raises BadInput for pickled objects, for a shape that needs more bytes than the file has, and for other files.
    """
    with _reading(path, ".npy"), path.open("rb") as file:
        _require_held(file, path.stat().st_size, str(path))
        file.seek(0)
        array: NDArray[Any] = np.load(path if mapped else file, mmap_mode="r" if mapped else None, allow_pickle=False)
    return array


def _read_members(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return an archive's members by name without .npy. Raises BadInput if one of them is not safe to unpack."""
    members = archive.infolist()
    inflated = sum(member.file_size for member in members)
    bound = max(FREE_BYTES, MOST_INFLATED * path.stat().st_size)
    if inflated > bound:
        raise BadInput(f"{path}: would inflate to {inflated} bytes, at most {bound} are read of it; save it as .npy")
    for member in members:
        if escapes_directory(member.filename):
            raise BadInput(f"{path}: its member {member.filename[:100]!r} has a path that leaves the archive")
        if member.flag_bits & 1 or member.compress_type not in _METHODS:
            raise BadInput(
                f"{path}: its member {member.filename[:100]!r} is encrypted, or is packed by neither store nor deflate"
            )
    return {member.filename.removesuffix(".npy"): member for member in members}


def _array_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    where = f"{path}: {member.filename[:100]}"
    with archive.open(member) as file:
        _require_held(file, member.file_size, where)
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False, max_header_size=LONGEST_HEADER)
    return array


def _chosen_keys(path: Path, key: str | None, names: Iterable[str]) -> Iterable[str]:
    if key is None:
        return names
    if key not in names:
        raise BadInput(f"{path}: has no key {key!r}, only {', '.join(sorted(names))[:300] or 'none'}")
    return (key,)


def arrays_from_npz(path: Path, *, key: str | None = None) -> dict[str, NDArray[Any]]:
    """Return all arrays of a .npz file by name, or only `key`. Raises BadInput as `array_from_npy` does."""
    with _reading(path, ".npz"), zipfile.ZipFile(path) as archive:
        members = _read_members(archive, path)
        return {name: _array_of(archive, members[name], path) for name in _chosen_keys(path, key, members)}


def array_from_npz(path: Path, key: str) -> NDArray[Any]:
    return arrays_from_npz(path, key=key)[key]


def arrays_from_safetensors(path: Path, *, key: str | None = None) -> dict[str, NDArray[Any]]:
    """Return all arrays of a .safetensors file by name, or only `key`. Raises BadInput for a damaged file."""
    with _reading(path, ".safetensors"), safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in _chosen_keys(path, key, list(file.keys()))}


def array_from_file(path: Path, key: str) -> NDArray[Any]:
    """Return the array of a .npy file, or `key` of a .npz file; the content decides, not the suffix."""
    with _reading(path, ".npy"), path.open("rb") as file:
        packed = file.read(2) == b"PK"
    return array_from_npz(path, key) if packed else array_from_npy(path)
