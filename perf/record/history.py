"""The bench records of a product's releases in one directory, a file each: added once, never overwritten.

A file is named by the time of its measurement and the digest of what it holds, so that records come in order, the same
record given twice is one file, and two processes that add at once lose nothing. What else lies in the directory is
named and left alone.
"""

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ground.errors import BadInput
from ground.files import replacing, sha256_of_file
from ground.text import printable

from .runs import Bench, load_bench

DIGEST_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One bench record with the name that it has in a history: time and digest."""

    name: str
    bench: Bench


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or record that is not in a trend, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The releases in the order in which they were measured, and the files that are none."""

    releases: tuple[Release, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def release_of_file(path: Path) -> Release:
    """The record under its name. Raises BadInput when the file is none or doesn't say when it was measured."""
    bench = load_bench(path)
    try:
        created = datetime.fromisoformat(bench.created)
        at = (created if created.tzinfo else created.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadInput(
            f"{path}: a history is in order of time, but this record was created {bench.created[:100]!r}; expected a "
            f"time such as 2026-05-01T12:00:00+00:00; measure again with `bench`"
        ) from None
    name = f"{at:%Y%m%dT%H%M%S}Z-{sha256_of_file(path)[:DIGEST_LETTERS]}"
    return Release(name=name, bench=bench)


def require_directory(directory: Path) -> None:
    """Raise BadInput where something else than a directory stands, or is on the way there."""
    for place in (directory, *directory.parents):
        if place.exists() and not place.is_dir():
            raise BadInput(f"{place}: a file, expected the directory that keeps the bench records of releases")


def load_history(directory: Path) -> History:
    """What the directory holds; nothing where it isn't there yet. Raises BadInput where it is no directory."""
    require_directory(directory)
    releases: list[Release] = []
    left_out = []
    for path in sorted(directory.iterdir() if directory.is_dir() else ()):
        if path.name.startswith("."):
            continue  # a record that another process is writing
        try:
            if path.suffix != ".json":
                raise BadInput(f"{path}: no bench record, whose name ends in .json")
            release = release_of_file(path)
            time, _, digest = path.stem.partition("-")
            if path.stem != release.name and time.endswith("Z") and len(digest) == DIGEST_LETTERS:
                raise BadInput(f"{path}: changed after it was kept, it is {release.name} now")
            releases.append(release)
        except BadInput as error:
            reason = printable(str(error).removeprefix(f"{path}: "))
            left_out.append(LeftOut(name=printable(path.name), reason=reason))
    releases.sort(key=lambda release: release.name)
    return History(releases=tuple(releases), left_out=tuple(left_out))


def add_release(directory: Path, record: Path) -> bool:
    """Keep the bench record, byte by byte; False where it is kept already. Raises BadInput as the functions above."""
    require_directory(directory)
    path = directory / f"{release_of_file(record).name}.json"
    if path.exists():
        return False
    with replacing(path) as temporary:
        shutil.copyfile(record, temporary)
    return True
