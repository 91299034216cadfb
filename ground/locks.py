"""A directory for one process alone."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import BadInput


@contextmanager
def locked(directory: Path, lock: Path, *, what: str) -> Iterator[None]:
    """The directory for this process alone, by the file `lock`; the kernel releases it when the process ends, however
    it ends. `what` works there is told to another one.

    Raises BadInput when another process works there.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BadInput(
                f"{directory}: another {what} ({file.read().strip() or 'unknown process'}) works in this directory; "
                "wait until it ends, or give another directory"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield
