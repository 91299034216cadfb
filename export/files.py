"""What may be read: regular files alone. A pipe would be waited on for ever, a device read until memory is full."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from export.errors import BadInput


def regular(path: Path) -> Path:
    """The path itself. Raises BadInput where something else than a regular file stands there."""
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe, socket or device"
        raise BadInput(f"{path}: a {kind}, expected a regular file")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside, renamed over `path` when the body ends well and removed when it doesn't: a server may be reading.

    Raises BadInput where something else than a regular file stands.
    """
    regular(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        with beside.open("rb") as stream:
            os.fsync(stream.fileno())
        beside.chmod(0o644)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def json_object(text: str, *, where: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises BadInput for anything else, and for what is nested without end."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise BadInput(f"{where}: its JSON is nested too deep") from None
    except ValueError as error:
        raise BadInput(f"{where}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadInput(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
