"""Commands in processes whose Nth open, write, fsync, rename or mkdir below one directory fails, once or for ever, or
that get a signal there; by a library (faults.c) that stands before the C library's, so that libraries' writes count.

The process that has it (LD_PRELOAD) imports everything once and forks for each command; no test forks by itself.
"""

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

SOURCE = Path(__file__).with_suffix(".c")
OPERATIONS = {"open": 1, "write": 2, "fsync": 4, "rename": 8, "mkdir": 16}
EVERY = sum(OPERATIONS.values())
LONGEST_S = 600
NOISE = ("effort.json", "lock", "digests.json")
"""What a command writes that is another one each time, and that nothing is taken from."""


def library(folder: Path) -> Path:
    """The preloaded one, compiled. Raises FileNotFoundError without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc)")
    path = folder / "faults.so"
    words = [compiler, "-O1", "-shared", "-fPIC", "-D_LARGEFILE64_SOURCE", "-o", str(path), str(SOURCE), "-ldl"]
    subprocess.run(words, check=True, timeout=60)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong at the `nth` operation (0: nothing): the error `number`, also at all later ones where `ever`, or
    a signal, which comes after `share` of the time that the command takes instead where that is given.
    """

    name: str
    nth: int = 0
    number: int = errno.ENOSPC
    ever: bool = False
    signal: int = 0
    share: float | None = None

    @property
    def code(self) -> int:
        """The exit code that a command has by it."""
        if self.signal == signal.SIGKILL:
            return -signal.SIGKILL
        return 128 + self.signal if self.signal else 4 if self.number in (errno.ENOSPC, errno.EIO) else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended: its exit code (minus the signal that killed it), what it said, how many operations there
    were, and at how many the fault came.
    """

    code: int
    said: str
    operations: int
    faults: int


def nothing() -> None:
    """What a process does first that is not disturbed beyond its fault."""


NOTHING = Fault(name="nothing")


def ended(
    words: Sequence[object],
    below: Path,
    fault: Fault = NOTHING,
    *,
    first: Callable[[], object] = nothing,
    takes_s: float = 0.0,
) -> Ended:
    """One command in a process of its own, which does something `first`; undisturbed it takes `takes_s`."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as counted:
        begun, begins = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                first()
                _child([str(word) for word in words], below, fault, said.fileno(), counted.fileno(), begins)
            finally:
                os._exit(71)
        os.close(begins)
        os.read(begun, 1)
        os.close(begun)
        if fault.share is not None:
            time.sleep(fault.share * takes_s)
            os.kill(child, fault.signal)
        status = os.waitpid(child, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        said.seek(0)
        counted.seek(0)
        operations, faults = (int(word) for word in (counted.read() or "0 1").split())
        return Ended(code=code, said=said.read(), operations=operations, faults=faults)


def _child(words: list[str], below: Path, fault: Fault, said: int, counted: int, begins: int) -> None:
    """Never returns; writes to `begins` when its handlers of signals stand."""
    from corp_deploy.cli import main

    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.alarm(LONGEST_S)
    shim, code = ctypes.CDLL(None), 70
    number = -fault.signal if fault.signal else fault.number
    point = 0 if fault.share is not None else fault.nth
    started = click.Group.invoke

    def begun(*given: Any) -> Any:
        os.write(begins, b".")
        return started(*given)

    click.Group.invoke = begun  # type: ignore[assignment,method-assign]
    try:
        shim.fault_arm(os.fsencode(below), EVERY, ctypes.c_long(point), number, int(fault.ever))
        main(words, standalone_mode=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        shim.fault_disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(counted, f"{shim.fault_count()} {shim.fault_sent()}".encode())
        os._exit(code)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below by its name, but NOISE."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.endswith(NOISE)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}
