"""Digests of files and folders, and the stamps of finished stages, which hold such digests. Imports no torch.

The digest of a file is kept with the file's size and time of change, and computed again only if these differ.
"""

import contextlib
import re
import time
from pathlib import Path
from typing import Literal

import msgspec

from ground.effort import is_effort
from ground.errors import BadInput
from ground.files import sha256_of_file, sha256_of_text, write_json
from ground.pictures import pictures_below
from ground.places import Place, Url, digest_of_url, require_path, without_column
from ground.records import record_from_file

IMAGE_LABELS = ("calibration.images", "held_out.images")
"""The labels of those inputs of stages that are folders of images."""
SAVED_DATASET = "state.json"
"""The file that marks a directory of datasets.save_to_disk."""
SETTLED_NS = 2_000_000_000
"""The least age of a file whose digest is kept: a younger one may change again without a new time of change."""


class KnownDigests(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="corp-deploy/digests"):
    """Size in bytes, time of change in nanoseconds, and sha256 of files, by absolute path."""

    version: Literal[1] = 1
    files: dict[str, tuple[int, int, str]]


def files_of(path: Path, *, pictures: bool = False) -> list[Path]:
    """Return the files that a path stands for, in a fixed order, an empty list for an absent path.

    A file stands for itself, a folder for all files below it but effort records (with `pictures`, for its pictures
    unless it has none or is a data set), and x-{00..07}.tar for its shards.
    """
    path = require_path(without_column(path)[0])
    if path.is_file():
        return [path]
    if pictures and path.is_dir() and (names := pictures_below(path)[0]) and not (path / SAVED_DATASET).is_file():
        return [each for name in names if (each := path / name).is_file()]
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file() and not is_effort(each))
    if "{" in path.name and path.parent.is_dir():
        return sorted(path.parent.glob(re.sub(r"\{[^}]*\}", "*", path.name)))
    return []


class Digests:
    """A cache of files' digests, kept in a file between runs; a cache that can't be read counts as empty."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._entries: dict[str, tuple[int, int, str]] = {}
        with contextlib.suppress(BadInput):
            self._entries = record_from_file(file, KnownDigests).files
        self._saved = dict(self._entries)
        self._urls: dict[Url, str] = {}

    def save(self) -> None:
        if self._entries == self._saved and self._file.is_file():
            return
        self._saved = dict(self._entries)
        write_json(self._file, msgspec.to_builtins(KnownDigests(files=self._entries)))

    def of_file(self, path: Path) -> str:
        status = path.stat()
        key, mark = str(path.resolve()), (status.st_size, status.st_mtime_ns)
        entry = self._entries.get(key)
        if entry is not None and entry[:2] == mark:
            return entry[2]
        digest = sha256_of_file(path)
        self._entries.pop(key, None)
        if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
            self._entries[key] = (*mark, digest)
        return digest

    def of_path(self, path: Place, *, pictures: bool = False) -> str:
        """Return the digest of a file, or for a folder or shards the digest of the list of file names and digests.

        Files of a URL are known by their ETags or checksums, which are asked for once. Raises BadInput for a path
        without files.
        """
        if isinstance(path, Url):
            if path not in self._urls:
                self._urls[path] = digest_of_url(path)
            return self._urls[path]
        if path.is_file():
            return self.of_file(path)
        files = files_of(path, pictures=pictures)
        if not files:
            raise BadInput(f"{path}: no such file or folder, or nothing in it; check the recipe")
        own = require_path(without_column(path)[0])
        base = own if own.is_dir() else own.parent
        return sha256_of_text("".join(f"{self.of_file(each)} {each.relative_to(base).as_posix()}\n" for each in files))


class Stamp(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="corp-deploy/stamp"):
    """The record of a finished stage: its inputs (digest or setting, by label) and outputs (sha256, by file)."""

    version: Literal[1] = 1
    inputs: dict[str, str]
    outputs: dict[str, str]


def stamp_path(state: Path, stage: str) -> Path:
    return state / f"{stage}.json"


def read_stamp(state: Path, stage: str) -> Stamp | None:
    try:
        return record_from_file(stamp_path(state, stage), Stamp)
    except BadInput:
        return None


def write_stamp(state: Path, stage: str, stamp: Stamp) -> None:
    write_json(stamp_path(state, stage), msgspec.to_builtins(stamp))
