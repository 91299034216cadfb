"""Exceptions for callers and the exit codes of commands. Imports nothing heavy."""

import errno
import os
import re
from collections.abc import Callable

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INCONCLUSIVE = 1, 2, 3
EXIT_MISSING, EXIT_NOT_COMPARABLE, EXIT_BUG, EXIT_INTERRUPTED = 4, 5, 70, 130
OUT_OF_MEMORY = ("out of memory", "failed to allocate memory", "can't allocate memory", "bad_alloc", "bad allocation")


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{6,}\b")


def strip_library_noise(message: object) -> str:
    """Return a library's message without addresses of objects and without an empty reason in parentheses."""
    return _ADDRESS.sub("", str(message)).replace(" ()", "")


_NAMED = re.compile(r"(?:\b([a-z]+) )?--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?: ('[^']*'|\w(?:[\w.:=-]*\w)?))?")


def respell_options(message: str, spell: Callable[[str, str, str], str | None]) -> str:
    """Return a message with its options, such as `--hold-out 8`, in the spelling of a recipe or of Python.

    `spell` gets the word before an option, the option's name with underscores and the word after it; both words may be
    empty. It returns None to leave the option unchanged.
    """

    def option(found: re.Match[str]) -> str:
        word, name, value = found[1] or "", found[2].replace("-", "_"), found[3] or ""
        if (whole := spell(word, name, value)) is not None and word:
            return whole
        own = spell("", name, value)
        return found[0] if own is None else f"{word} {own}" if word else own

    return _NAMED.sub(option, message)


class BadInput(ValueError):
    """A mistake of the user; the message says what is wrong, where, what was got and expected, and what to do."""

    def __init__(self, message: object = "") -> None:
        super().__init__(strip_library_noise(message))


class NotComparable(BadInput):
    """Two records that must not be compared; the message names what differs."""


class Missing(RuntimeError):
    """Hardware or software that the step needs and this machine lacks; the message says how to get it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(strip_library_noise(message))


class RankLost(Missing):
    """A process of a distributed calibration that has ended or can't be reached; nothing was written."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of any runtime says that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY)


_OS_ERROR = re.compile(r"\bos error (\d+)\b|\berrno[ :=]+(\d+)\b", re.IGNORECASE)
_CUT_OFF = re.compile(r"^\d+ requested and \d+ written$")


def os_error_from(error: Exception) -> OSError | None:
    """Return the operating system's error behind an error of a library, None if there is none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if isinstance(error, OSError) and _CUT_OFF.match(str(error)):  # numpy's message when the disk is full
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    match = _OS_ERROR.search(str(error))
    number = 0 if match is None else int(match[1] or match[2])
    return OSError(number, os.strerror(number)) if number in errno.errorcode else None
