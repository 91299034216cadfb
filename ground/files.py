"""Files that appear whole or not at all, their digests, and what may be read: regular files alone, and records that are
neither huge nor nested without end. A pipe would be waited on for ever, a device read until memory is full.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import BadInput

MOST_BYTES = 2**28
DEEPEST = 40


def regular(path: Path) -> Path:
    """The path itself. Raises BadInput where something else than a regular file stands there."""
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe, socket or device"
        raise BadInput(f"{path}: a {kind}, expected a regular file")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it when the body ends well and removed when it doesn't.

    Raises BadInput where something else than a regular file stands: a device is never replaced.
    """
    regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or none."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON record with a final newline; keys keep their order."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    """Hex digest of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _refuse_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return
    raise BadInput(f"{where}: its JSON is nested too deep; records have {DEEPEST} levels at most")


def object_from_text(text: str, *, where: str) -> dict[str, Any]:
    """The JSON object in a text. Raises BadInput for anything else, and for what is nested without end."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise BadInput(f"{where}: its JSON is nested too deep; records have {DEEPEST} levels at most") from None
    except ValueError as error:
        raise BadInput(f"{where}: not JSON ({error}); it may be cut short") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected a JSON object, got {type(value).__name__}")
    _refuse_depth(value, where)
    return value


def object_from_file(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises BadInput for a file that is missing, no regular one, too large or no JSON."""
    try:
        size = regular(path).stat().st_size
        if size > MOST_BYTES:
            raise BadInput(f"{path}: {size} bytes, a record has {MOST_BYTES} at most")
        return object_from_text(path.read_text(encoding="utf-8"), where=str(path))
    except FileNotFoundError:
        raise BadInput(f"{path}: cannot be read: no such file") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not JSON ({error})") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def whole(where: str, what: str = "record") -> Iterator[None]:
    """What reads a record by its keys: raises BadInput, naming the record, where one is missing or of another type."""
    try:
        yield
    except BadInput:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise BadInput(
            f"{where}: not a whole {what} ({type(error).__name__}: {error!s:.200}); make it again"
        ) from error


def require_kind(data: Mapping[str, Any], *, kind: str, version: int, where: str) -> None:
    """Raise BadInput unless a record is of this kind and version."""
    if data.get("kind") != kind:
        raise BadInput(f"{where}: expected a {kind} record, got {str(data.get('kind'))[:100]!r}")
    if data.get("version") != version:
        got = str(data.get("version"))[:100]
        raise BadInput(f"{where}: {kind} record of version {got}; this tool reads version {version}")


def read_json(path: Path, *, kind: str, version: int = 1) -> dict[str, Any]:
    """The JSON object in `path`, of this kind and version; raises BadInput otherwise."""
    data = object_from_file(path)
    require_kind(data, kind=kind, version=version, where=str(path))
    return data
