"""Transactions of files in one directory, which are replaced together or not at all.

A rollback journal, the folder FORMER, holds the previous files from before the first rename until after the last.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec

from .errors import BadInput
from .files import escapes_directory, flush_to_disk, path_inside, regular_file, temporary_beside, text_from_file

FORMER = ".former"
_ABSENT = ".absent.json"


@contextmanager
def replacing_files(directory: Path, names: Sequence[str], *, removed: Sequence[str] = ()) -> Iterator[list[Path]]:
    """Yield temporary paths for files of one directory, and install them all there if the body succeeds.

    Files named in `removed` are deleted in the same transaction. If the body fails, nothing changes, and directories
    created for the files are removed. Processes that write to the directory wait for each other. If a process is killed
    between two renames, the next one, or `roll_back_interrupted`, restores the previous files.
    """
    folders = {folder for name in names for folder in (directory / name).parents}
    created = sorted((each for each in folders if not each.exists()), reverse=True)
    try:
        with ExitStack() as stack:
            temporaries = [stack.enter_context(temporary_beside(directory / name)) for name in names]
            yield temporaries
            install_files(directory, dict(zip(names, temporaries, strict=True)), removed=removed)
    except BaseException:
        for each in created:
            with suppress(OSError):
                each.rmdir()
        raise


def install_files(directory: Path, moves: Mapping[str, Path], *, removed: Sequence[str] = ()) -> None:
    """Move files and folders of the same disk to names below the directory, all or none.

    Raises BadInput if a folder's name is taken, or a file's name is taken by something other than a regular file.
    """
    for source in moves.values():
        for each in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if each.is_file():
                flush_to_disk(each)
    with exclusive_access(directory):
        _roll_back(directory)
        for stale in directory.glob(f"{FORMER}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        for name, source in moves.items():
            if source.is_dir() and os.path.lexists(directory / name):
                raise BadInput(f"{directory / name}: in the way; remove it, or give another name")
            regular_file(directory / name)
        _install(directory, moves, removed)


def roll_back_interrupted(directory: Path) -> None:
    """Restore the previous files if a process was killed while it replaced them."""
    if (directory / FORMER).is_dir():
        with exclusive_access(directory):
            _roll_back(directory)


@contextmanager
def exclusive_access(directory: Path) -> Iterator[None]:
    """Make other processes that ask for the same directory wait, if the file system has locks."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _install(directory: Path, moves: Mapping[str, Path], removed: Sequence[str]) -> None:
    journal = directory / f"{FORMER}-{secrets.token_hex(4)}"
    try:
        _write_journal(journal, directory, (*moves, *removed))
        journal.rename(directory / FORMER)
        for name, source in moves.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            source.replace(directory / name)
        for name in removed:
            (directory / name).unlink(missing_ok=True)
        (directory / FORMER).rename(journal)
    except BaseException:
        _roll_back(directory)
        raise
    finally:
        shutil.rmtree(journal, ignore_errors=True)


def _write_journal(journal: Path, directory: Path, names: Sequence[str]) -> None:
    journal.mkdir()
    absent = [_first_absent(directory, name) for name in names if not (directory / name).exists()]
    (journal / _ABSENT).write_text(json.dumps(absent), encoding="utf-8")
    for name in names:
        if (directory / name).exists():
            (journal / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(directory / name, journal / name)
            except OSError:  # a file system without hard links
                shutil.copyfile(directory / name, journal / name)
                flush_to_disk(journal / name)


def _first_absent(directory: Path, name: str) -> str:
    steps = [PurePosixPath(name), *PurePosixPath(name).parents]
    return str(next(step for step in reversed(steps) if not (directory / step).exists()))


def _read_absent(journal: Path) -> list[str]:
    """Return the names that were absent before. Raises BadInput for a journal that this tool did not write."""
    try:
        names = msgspec.json.decode(text_from_file(journal / _ABSENT), type=list[str])
    except (msgspec.DecodeError, FileNotFoundError):
        names = [""]
    if any(map(escapes_directory, names)):
        raise BadInput(f"{journal}: this tool did not write this journal; look at it, and remove it")
    return names


def _remove(path: Path, journal: Path) -> None:
    if path.is_symlink() or journal.parent.resolve() not in path.resolve().parents or path == journal:
        raise BadInput(f"{journal}: {str(path)[:200]} is not in its directory; look at it, and remove it")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _roll_back(directory: Path) -> None:
    """Restore the files of the journal, if there is one; an interrupted call can be repeated."""
    journal = directory / FORMER
    if not journal.is_dir():
        return
    for name in _read_absent(journal):
        _remove(directory / name, journal)
    for path in sorted(journal.rglob("*")):
        if path.is_file() and path.name != _ABSENT:
            name = str(path.relative_to(journal))
            path_inside(journal, name, where=str(journal))
            path.replace(path_inside(directory, name, where=str(journal)))
    finished = directory / f"{FORMER}-{secrets.token_hex(4)}"
    journal.rename(finished)
    shutil.rmtree(finished, ignore_errors=True)
