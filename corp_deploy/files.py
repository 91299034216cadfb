"""Files that appear whole or not at all, and their digests."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import BadInput


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed over it when the body ends well and removed when it doesn't."""
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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON record with a final newline; keys keep their order."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, *, kind: str) -> dict[str, Any]:
    """Read a record of the given kind and version 1. Raises BadInput for a missing, broken or foreign file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file, expected a {kind} record") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"{path}: can't be read as JSON ({error}); make it again") from None
    if not isinstance(value, dict) or value.get("kind") != kind:
        found = value.get("kind") if isinstance(value, dict) else type(value).__name__
        raise BadInput(f"{path}: expected a {kind} record, got {found!r}")
    if value.get("version") != 1:
        raise BadInput(f"{path}: {kind} record of version {value.get('version')!r}, this release reads version 1")
    return value


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    """Hex digest of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
