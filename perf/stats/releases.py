"""The releases of one directory: their bench records and the files that describe them.

Records are never overwritten. Their files are named by time and digest, so that several processes may add some. Files
of the same release are kept beside them (NAME.parity.json). A folder with a bench.json is a release, too.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ground.errors import BadInput
from ground.files import replacing, sha256_of_file
from ground.text import printable
from perf.record.runs import Bench, load_bench

DIGEST_LETTERS = 12
BENCH = "bench.json"
PARITY, RECIPE, MANIFEST = BESIDE = ("parity.json", "recipe.toml", "manifest.json")
"""The names of files that describe a measured release."""
_IS_BESIDE = re.compile(rf"\d{{8}}T\d{{6}}Z-[0-9a-f]{{{DIGEST_LETTERS}}}\.({'|'.join(map(re.escape, BESIDE))})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One bench record with its name in a history: time and digest; `path` is the file that it was read from."""

    name: str
    bench: Bench
    path: Path | None = None

    def beside(self, kind: str) -> Path | None:
        """Return the path of this release's file of a kind in BESIDE, None if there is none."""
        if self.path is None:
            return None
        path = self.path.with_name(kind if self.path.name == BENCH else f"{self.path.stem}.{kind}")
        return path if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or record that a trend leaves out, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The releases in the order of measurement, and the files that are no records."""

    releases: tuple[Release, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def release_of_file(path: Path) -> Release:
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
    return Release(name=name, bench=bench, path=path)


def require_directory(directory: Path) -> None:
    for place in (directory, *directory.parents):
        if place.exists() and not place.is_dir():
            raise BadInput(f"{place}: a file, expected the directory that keeps the bench records of releases")


def load_history(directory: Path) -> History:
    require_directory(directory)
    releases: list[Release] = []
    left_out = []
    for path in sorted(directory.iterdir() if directory.is_dir() else ()):
        if path.name.startswith(".") or _IS_BESIDE.fullmatch(path.name):
            continue  # a record that another process is writing, or a file beside a record
        try:
            releases.append(_release_at(path))
        except BadInput as error:
            reason = printable(str(error).removeprefix(f"{path}: "))
            left_out.append(LeftOut(name=printable(path.name), reason=reason))
    releases.sort(key=lambda release: release.name)
    return History(releases=tuple(releases), left_out=tuple(left_out))


def _release_at(path: Path) -> Release:
    if (path / BENCH).is_file():
        return release_of_file(path / BENCH)
    if path.suffix != ".json":
        raise BadInput(f"{path}: expected a bench record with a name that ends in .json, or a folder with {BENCH}")
    release = release_of_file(path)
    time, _, digest = path.stem.partition("-")
    if path.stem != release.name and time.endswith("Z") and len(digest) == DIGEST_LETTERS:
        raise BadInput(f"{path}: changed after it was kept, it is {release.name} now")
    return release


def add_release(directory: Path, record: Path, parity: Path | None = None) -> bool:
    """Keep a bench record, the files of BESIDE in its folder, and `parity` in place of parity.json.

    Returns False for a record that is kept already.
    """
    require_directory(directory)
    name = release_of_file(record).name
    files = {f"{name}.{kind}": record.with_name(kind) for kind in BESIDE} | {f"{name}.json": record}
    if parity is not None:
        files[f"{name}.{PARITY}"] = parity
    fresh = [(directory / name, file) for name, file in files.items() if file.is_file()]
    fresh = [(path, file) for path, file in fresh if not path.exists()]
    for path, file in fresh:
        with replacing(path) as temporary:
            shutil.copyfile(file, temporary)
    return any(file == record for _, file in fresh)


def comparable_releases(
    history: History, newest: Release, mismatch: Callable[[Bench, Bench], str | None]
) -> tuple[list[Release], list[LeftOut]]:
    """Return the different releases up to the newest, and what is left out, also for a reason from `mismatch`."""
    left_out = list(history.left_out)
    releases: list[Release] = []
    for release in history.releases:
        is_later = release.name > newest.name and release.bench != newest.bench
        reason = "measured after the record that is judged" if is_later else mismatch(release.bench, newest.bench)
        if reason is not None:
            left_out.append(LeftOut(name=release.name, reason=reason))
        elif all(release.bench != other.bench for other in (*releases, newest)):  # also if formatted otherwise
            releases.append(release)
    return [*releases, newest], left_out
