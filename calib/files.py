"""What may be read: regular files alone. A pipe would be waited on for ever, a device read until memory is full."""

from pathlib import Path

from .errors import BadInput


def regular(path: Path) -> Path:
    """The path itself. Raises BadInput where something else than a regular file stands there."""
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe, socket or device"
        raise BadInput(f"{path}: a {kind}, expected a regular file")
    return path
