"""Places of files: paths, and URLs such as s3://bucket/images, whose files fsspec opens. Imports fsspec on use only."""

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias, cast

from .errors import BadInput, Missing
from .files import regular_file, sha256_of_text

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.")
MOST_FILES = 100_000
_RANGE = re.compile(r"\{([0-9]{1,12})\.\.([0-9]{1,12})\}")
_COLUMN = re.compile(r"(.+)#([^/#]+)", re.S)
_CONTENT_MARKS = {"etag", "md5hash", "content_md5", "blob_id", "sha256", "crc32c", "generation", "xet_hash"}
_TIMES = {"mtime", "lastmodified", "last_modified", "updated", "created", "modified"}


class Url(str):
    """A URL with those parts of pathlib.Path that places of inputs are asked for."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return PurePosixPath(self.rstrip("/")).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.rstrip('/')}/{name}")

    def resolve(self) -> "Url":
        return self


Place: TypeAlias = Path | Url


def place_from_text(text: str | os.PathLike[str]) -> Place:
    """Return a URL as a Url, any other text as a Path."""
    plain = os.fspath(text)
    return Url(plain) if _URL.match(plain) else Path(plain)


def place_below(directory: Path, text: str | os.PathLike[str]) -> Place:
    """Return a URL as it is, or a path joined to `directory`."""
    place = place_from_text(text)
    return place if isinstance(place, Url) else directory / place


def require_path(place: Place) -> Path:
    """Return a path. Raises BadInput for a URL."""
    if isinstance(place, Path):
        return place
    raise BadInput(f"{place}: only images are read from URLs; copy the file, and give its path")


def without_column(place: Place) -> tuple[Place, str | None]:
    """Return the place before the last `#` and the name of a column behind it, None without one or for a file."""
    match = _COLUMN.fullmatch(str(place))
    if match is None or (isinstance(place, Path) and place.exists()):
        return place, None
    return place_from_text(match[1]), match[2]


def places_from_pattern(pattern: Place | str) -> list[Place]:
    """Expand `shards-{000..099}.tar` to a hundred places; numbers are as wide as the first one."""
    parts = _RANGE.split(str(pattern))
    literals, ranges, count = parts[::3], [], 1
    for first, last in zip(parts[1::3], parts[2::3], strict=True):
        if int(first) > int(last):
            raise BadInput(f"{pattern}: range {first}..{last} runs backwards")
        count *= int(last) - int(first) + 1
        if count > MOST_FILES:
            raise BadInput(f"{pattern}: {count} shards, expected {MOST_FILES} at most")
        ranges.append([str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)])
    woven = [
        "".join(itertools.chain(*zip(literals, (*numbers, ""), strict=True))) for numbers in itertools.product(*ranges)
    ]
    return [place_from_text(text) for text in woven]


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Raise BadInput for any error at reading a place, Missing for a package that the URL's protocol needs."""
    try:
        yield
    except (BadInput, Missing, MemoryError):
        raise
    except FileNotFoundError:
        raise BadInput(f"{place}: no such file or folder") from None
    except ImportError as error:
        raise Missing(f"{place}: {error}; install the package that reads such URLs") from error
    except OSError as error:
        raise BadInput(f"{place}: can't be read ({error.strerror or error!s:.200})") from error
    except Exception as error:  # each file system raises its own errors
        if isinstance(place, Path):
            raise
        raise BadInput(f"{place}: can't be read ({type(error).__name__}: {error!s:.200})") from error


def file_system(url: Url) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, cached by fsspec for each process, and the path in it.

    Raises Missing without fsspec or the protocol's package, BadInput for an unknown protocol.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise Missing(f"{url}: URLs need fsspec; pip install 'corp-deploy[data]'") from error
    with reading(url):
        system, path = url_to_fs(str(url))
    return system, path


def open_file(place: Place) -> IO[bytes]:
    """Open a regular file, or the file of a URL for reading by ranges. Raises BadInput if it can't be opened."""
    with reading(place):
        if isinstance(place, Path):
            return regular_file(place).open("rb")
        system, path = file_system(place)
        return cast(IO[bytes], system.open(path, "rb"))


def read_at_once(url: Url) -> bytes:
    """Return the bytes of a URL, in one request."""
    system, path = file_system(url)
    with reading(url):
        return bytes(system.cat_file(path))


def is_folder(place: Place) -> bool:
    if isinstance(place, Path):
        return place.is_dir()
    system, path = file_system(place)
    with reading(place):
        return bool(system.isdir(path))


def is_there(place: Place) -> bool:
    if isinstance(place, Path):
        return place.exists()
    system, path = file_system(place)
    with reading(place):
        return bool(system.exists(path))


def files_below(url: Url) -> Mapping[str, Mapping[str, Any]]:
    """Return the file system's facts of each file below a URL, by its path relative to the URL, sorted.

    A file itself has the path "". Raises BadInput if there is none.
    """
    system, path = file_system(url)
    with reading(url):
        found: Mapping[str, Mapping[str, Any]] = system.find(path, detail=True)
    root = str(path).strip("/")
    names = {name.strip("/").removeprefix(root).strip("/"): facts for name, facts in found.items()}
    if not names:
        raise BadInput(f"{url}: no such file or folder, or nothing in it")
    return dict(sorted(names.items()))


def digest_of_url(url: Url) -> str:
    """Return a digest that changes with the files at a URL: of their names, sizes, and ETags or checksums.

    Files without such a mark are told apart by their times of change, and those without a time are read.
    """
    places = (each for each in places_from_pattern(without_column(url)[0]) if isinstance(each, Url))
    marks = [[name, *_marks(each, name, facts)] for each in places for name, facts in files_below(each).items()]
    return sha256_of_text(json.dumps(marks))


def _marks(url: Url, name: str, facts: Mapping[str, Any]) -> list[str]:
    for keys in (_CONTENT_MARKS, _TIMES):
        marks = [f"{key}={value}" for key, value in sorted(facts.items()) if key.lower() in keys and value]
        if marks:
            return [str(facts.get("size")), *marks]
    with reading(url), open_file(url / name if name else url) as file:
        return [file_digest(file, "sha256").hexdigest()]  # type: ignore[arg-type]  # a file of fsspec is a reader
