"""Checks before any work that results can be written to their paths."""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from .errors import BadInput, Missing
from .files import regular_file, temporary_name

MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Errors that another path in the same file system would not avoid."""


def _nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _is_of_another_user(path: Path) -> bool:
    """Return whether the sticky bit of a folder, such as /tmp, forbids replacing a file there of another user."""
    folder, user = path.parent.stat(), os.geteuid()
    is_kept = os.path.lexists(path) and bool(folder.st_mode & stat.S_ISVTX)
    return is_kept and user not in (0, folder.st_uid, path.lstat().st_uid)


def require_writable(path: Path, *, folder: bool) -> None:
    """Raise BadInput if no file, or with `folder` no folder of files, can be written to a path; leave nothing there.

    Raises OSError, with the path, if the machine has no space or no free file handles.
    """
    existing = _nearest_existing(path)
    where = existing if folder or existing != path else path.parent
    if not where.is_dir():
        kind = "a dangling link" if where.is_symlink() and not where.exists() else "no directory"
        raise BadInput(f"{path}: can't be written, as {where} is {kind}; give another path")
    try:
        with suppress(FileNotFoundError):  # a name too long is refused here
            (path if folder else temporary_name(regular_file(path))).lstat()
        with TemporaryFile(dir=where):
            pass
        if not folder and where == path.parent and _is_of_another_user(path):
            raise PermissionError(errno.EPERM, "the file is another user's")
    except OSError as error:
        if error.errno in MACHINE_ERRORS:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise BadInput(
            f"{path}: can't be written in {where} ({error.strerror}); give another path, or make that one writable"
        ) from None


def require_space(path: Path, size_bytes: float, *, what: str) -> None:
    """Raise Missing if the disk of a path has less free space than `size_bytes`."""
    free = shutil.disk_usage(_nearest_existing(path)).free
    if free < size_bytes:
        raise Missing(
            f"{path}: {what} about {size_bytes / 2**20:,.0f} MiB, and the disk has {free / 2**20:,.0f} MiB free; free "
            "some space, or write elsewhere"
        )
