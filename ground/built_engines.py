"""The list of engines that this user built on this machine, by SHA-256; any other engine came from elsewhere.

The list is in the user's state directory ($XDG_STATE_HOME, else ~/.local/state). A note beside the engine would prove
nothing, because the author of a foreign engine could write it too.
"""

import os
from contextlib import suppress
from pathlib import Path


def engine_list_path() -> Path:
    """Return the path of the list, which may not exist yet."""
    state_home = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state_home if state_home.is_absolute() else Path.home() / ".local" / "state") / "corp-deploy" / "engines"


def record_built_engine(sha256: str) -> None:
    """Add an engine's SHA-256 to the list; if the list can't be written, the engine counts as foreign."""
    with suppress(OSError, RuntimeError):
        path = engine_list_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # One write, begun with a newline, so that a line that was cut short does not spoil this one.
            os.write(handle, f"\n{sha256}\n".encode())
        finally:
            os.close(handle)


def is_built_here(sha256: str) -> bool:
    try:
        with engine_list_path().open("rb") as lines:
            return any(line.strip() == sha256.encode() for line in lines)
    except (OSError, RuntimeError):
        return False
