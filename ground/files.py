"""Atomic writes, digests and guarded reads of files, and locks of directories.

Only regular files are read: reading a pipe may never end, and reading a device may fill the memory.
"""

import codecs
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from .errors import BadInput

_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
MOST_TEXT_BYTES = 2**20


def regular_file(path: Path) -> Path:
    """Return the path. Raises BadInput if it exists and is no regular file."""
    if path.exists() and not path.is_file():
        kind = "directory" if path.is_dir() else "pipe, socket or device"
        raise BadInput(f"{path}: a {kind}, expected a regular file")
    return path


def escapes_directory(name: str) -> bool:
    """Return whether a relative name from a file could lead outside that file's directory."""
    path = PurePosixPath(name)
    return not name or "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts


def path_inside(directory: Path, name: str, *, where: str) -> Path:
    """Return the path of a name that a file in `directory` refers to.

    Raises BadInput, beginning with `where`, for a name that leaves the directory and for one that is, or goes through,
    a link.
    """
    if escapes_directory(name):
        raise BadInput(f"{where}: {name[:150]!r} leads out of its directory; expected a file in or below it")
    path = directory / name
    steps = [path, *path.parents][: len(PurePosixPath(name).parts)]
    if link := next((step for step in steps if step.is_symlink()), None):
        raise BadInput(f"{where}: {str(link.relative_to(directory))[:150]!r} is a link; expected a file of its own")
    return regular_file(path)


def temporary_name(path: Path) -> Path:
    """Return a path for a temporary file in the folder of `path`."""
    return path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` and remove it afterwards. Raises BadInput if `path` is no regular file."""
    regular_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:  # begins before the file exists, because a signal may come at any moment
        temporary.open("xb").close()
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def flush_to_disk(temporary: Path) -> None:
    """Write a file's buffers to the disk and make it readable for all users."""
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    temporary.chmod(0o644)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the body succeeds, else remove it.

    Raises BadInput if `path` exists and is no regular file: a device is never replaced.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)


def text_from_file(path: Path, *, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a file without its byte-order mark.

    Raises BadInput for a file that is not regular, too large or not UTF-8.
    """
    size = regular_file(path).stat().st_size
    if size > most_bytes:
        raise BadInput(f"{path}: {size} bytes, at most {most_bytes} are read of such a file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        refuse_utf16(error.object, str(path))
        raise BadInput(f"{path}: not UTF-8 ({error.reason} at byte {error.start + 1})") from None


def refuse_utf16(begin: bytes, where: str) -> None:
    """Raise BadInput for a text whose first bytes are the byte-order mark of UTF-16 or UTF-32."""
    name = next((name for mark, name in _OTHER_MARKS.items() if begin.startswith(mark)), None)
    if name is not None:
        raise BadInput(f"{where}: the text is {name}, expected UTF-8; save it as UTF-8")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write a JSON file with a final newline, whole or not at all; keys keep their order."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def sha256_of_file(path: Path) -> str:
    with regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _opened_lock(directory: Path, lock: Path, what: str) -> TextIO:
    """Open and lock the file `lock`. Raises BadInput, naming the other process, if it is locked."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = lock.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        other = file.read().strip() or "unknown process"
        file.close()
        raise BadInput(
            f"{directory}: another {what} ({other}) works in this directory; wait until it ends, or give another "
            "directory"
        ) from None
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()  # another process removed it as it ended
    return _opened_lock(directory, lock, what)


@contextmanager
def locked(directory: Path, lock: Path, *, what: str) -> Iterator[None]:
    """Hold the file `lock` during the body, so that only this process works in the directory.

    The kernel releases the lock when the process ends in any way. Folders created for the lock are removed if nothing
    else is in them. `what` names the work in the message to other processes.

    Raises BadInput if another process holds the lock.
    """
    made = [each for each in lock.parents if not each.exists()]
    with _opened_lock(directory, lock, what) as file:
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        file.flush()
        try:
            yield
        finally:
            if made and list(lock.parent.iterdir()) == [lock]:
                lock.unlink()
                with suppress(OSError):
                    for each in made:
                        each.rmdir()
