"""The engines that this user built on this machine, by digest: what is not among them came from elsewhere.

A list in the user's own state directory ($XDG_STATE_HOME, else ~/.local/state), and not a note beside the engine, which
whoever made the engine would have written too.
"""

import os
from contextlib import suppress
from pathlib import Path


def engine_list_path() -> Path:
    """Where the list stands, or will."""
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state_home if state_home.is_absolute() else Path.home() / ".local" / "state") / "corp-deploy" / "engines"


def record_built_engine(sha256: str) -> None:
    """Add an engine. Where the list can't be written, it will count as one from elsewhere."""
    with suppress(OSError, RuntimeError):
        path = engine_list_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # Whole in one call, and begun with a line's end: a line that was cut short spoils no other.
            os.write(handle, f"\n{sha256}\n".encode())
        finally:
            os.close(handle)


def is_built_here(sha256: str) -> bool:
    """Whether it is in the list."""
    try:
        with engine_list_path().open("rb") as lines:
            return any(line.strip() == sha256.encode() for line in lines)
    except (OSError, RuntimeError):
        return False
