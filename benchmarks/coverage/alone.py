"""A measurement in a process of its own, within a time and an amount of memory."""

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]


def alone(measured: Callable[[], Row], *, most_s: int, most_bytes: int) -> Row:
    """Return the row of a measurement made in a fork of this process, or the error under `said`.

    The limits are CPU seconds and bytes. A fork needs no imports.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_answer, args=(measured, sending, most_s, most_bytes), daemon=True
    )
    process.start()
    sending.close()
    try:
        row: Row = receiving.recv()
    except EOFError:
        row = {"said": f"ended by the limit of {most_s} s or {most_bytes >> 30} GiB"}
    process.join()
    return row


def _answer(measured: Callable[[], Row], to: Connection, most_s: int, most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    try:
        row = measured()
    except Exception as error:
        row = {"said": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
    to.send(row)
