"""Readers of untrusted NumPy and safetensors files.

A header is checked against the size of its file before memory is allocated. Nothing is unpickled, and the inflated size
of an archive is bounded.
"""

import io
import json
import math
import struct
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

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
_DTYPES: dict[object, "np.dtype[Any]"] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_PREFIXES = {(1, 0): "<H", (2, 0): "<I"}
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def _damaged(where: str, kind: str, reason: object) -> BadInput:
    return BadInput(f"{where}: not a valid {kind} file ({reason!s:.200})")


class ArrayPlace(NamedTuple):
    """The shape and type of an array, its order in memory, and the offset of its values in a file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: "np.dtype[Any]"
    start: int


def _read_header(file: IO[bytes], where: str) -> ArrayPlace:
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
        shape, is_fortran, dtype = _READERS[version](io.BytesIO(head + text), max_header_size=LONGEST_HEADER)
    except KeyError:
        raise _damaged(where, ".npy", f"version {magic[6:8]!r} of the format, expected 1.0 or 2.0") from None
    except Exception as error:  # a header nested too deep raises errors of Python's parser, MemoryError too
        raise _damaged(where, ".npy", error or type(error).__name__) from None
    return ArrayPlace(shape, is_fortran, dtype, len(magic) + size + length)


def _require_held(file: IO[bytes], size_bytes: int, where: str) -> ArrayPlace:
    """Return a .npy file's header. Raises BadInput unless it describes plain numbers or texts within `size_bytes`."""
    header = shape, _, dtype, start = _read_header(file, where)
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
    return header


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


def array_in_stream(file: IO[bytes], size_bytes: int, key: str, *, where: str) -> ArrayPlace:
    """Find the array of a .npy file, or `key` of a .npz or .safetensors file, in a file that is read by ranges.

    Raises BadInput for a damaged file, without the key, and for a compressed member, whose rows have no place.
    """
    match Path(where).suffix:
        case ".npy":
            return _require_held(file, size_bytes, where)
        case ".npz":
            return _stored_member(file, key, where)
    return _tensor_in_stream(file, size_bytes, key, where)


def _stored_member(file: IO[bytes], key: str, where: str) -> ArrayPlace:
    try:
        with zipfile.ZipFile(file) as archive:
            member = {each.filename: each for each in archive.infolist()}.get(f"{key}.npy")
            names = ", ".join(sorted(each.removesuffix(".npy") for each in archive.namelist()))[:300]
        if member is None:
            raise BadInput(f"{where}: has no key {key!r}, only {names or 'none'}")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise BadInput(f"{where}: is compressed, so its rows can't be read from afar; save it as .npy")
        file.seek(member.header_offset + 26)
        begin = file.tell() + 4 + sum(struct.unpack("<HH", file.read(4)))
    except (zipfile.BadZipFile, struct.error, OverflowError, ValueError) as error:
        raise error if isinstance(error, BadInput) else _damaged(where, ".npz", error) from None
    file.seek(begin)
    header = _require_held(file, member.file_size, where)
    return header._replace(start=begin + header.start)


def _tensor_in_stream(file: IO[bytes], size_bytes: int, key: str, where: str) -> ArrayPlace:
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size_bytes, FREE_BYTES):
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(file.read(length))
        if key not in entries:
            raise BadInput(f"{where}: has no key {key!r}, only {', '.join(sorted(entries))[:300] or 'none'}")
        dtype, shape = _DTYPES.get(entries[key]["dtype"]), tuple(map(int, entries[key]["shape"]))
        begin, end = map(int, entries[key]["data_offsets"])
        if dtype is None:
            raise BadInput(f"{where}: {key} is {str(entries[key]['dtype'])[:20]}, expected F32 or U8")
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= size_bytes - 8 - length:
            raise ValueError(f"{key} lies outside the file")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{key} has {end - begin} bytes for {list(shape)[:9]}")
    except BadInput:
        raise
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(where, ".safetensors", error) from None
    return ArrayPlace(shape, False, dtype, 8 + length + begin)


def array_from_file(path: Path, key: str) -> NDArray[Any]:
    """Return the array of a .npy file, or `key` of a .npz file; the content decides, not the suffix."""
    with _reading(path, ".npy"), path.open("rb") as file:
        packed = file.read(2) == b"PK"
    return array_from_npz(path, key) if packed else array_from_npy(path)
