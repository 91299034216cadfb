"""Commands in processes whose Nth open, write, fsync, rename or mkdir below one directory fails, once or for ever, or
that get a signal there; by a library (faults.c) that stands before the C library's, so that libraries' writes count.

The process that has it (LD_PRELOAD) imports everything once and forks for each command; no test forks by itself.
"""

import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ground.together import FORMER, put_back

SOURCE = Path(__file__).with_suffix(".c")
OPERATIONS = {"open": 1, "write": 2, "fsync": 4, "rename": 8, "mkdir": 16}
EVERY = sum(OPERATIONS.values())
LONGEST_S = 120
NOISE = ("effort.json", "lock", "digests.json")
"""What a command writes that is another one each time, and that nothing is taken from."""


STATE = ".partial."
"""Of the names of what a command goes on from where it was interrupted."""


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
    a signal, which comes after `seconds` instead where those are given.
    """

    name: str
    nth: int = 0
    number: int = errno.ENOSPC
    ever: bool = False
    signal: int = 0
    seconds: float | None = None

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


def ended(words: Sequence[object], below: Path, fault: Fault, first: Callable[[], object] = nothing) -> Ended:
    """One command in a process of its own, which does something `first`."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as counted:
        child = os.fork()
        if child == 0:
            first()
            _child([str(word) for word in words], below, fault, said.fileno(), counted.fileno())
        if fault.seconds is not None:
            time.sleep(fault.seconds)
            os.kill(child, fault.signal)
        status = os.waitpid(child, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        said.seek(0)
        counted.seek(0)
        operations, faults = (int(word) for word in (counted.read() or "0 1").split())
        return Ended(code=code, said=said.read(), operations=operations, faults=faults)


def _child(words: list[str], below: Path, fault: Fault, said: int, counted: int) -> None:
    """Never returns."""
    from corp_deploy.cli import main

    os.dup2(said, 1)
    os.dup2(said, 2)
    signal.alarm(LONGEST_S)
    shim, code = ctypes.CDLL(None), 70
    number = -fault.signal if fault.signal else fault.number
    point = 0 if fault.seconds is not None else fault.nth
    try:
        shim.fault_arm(os.fsencode(below), EVERY, ctypes.c_long(point), number, int(fault.ever))
        main(words, standalone_mode=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        shim.fault_disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(counted, f"{shim.fault_count()} {shim.fault_sent()}".encode())
        os._exit(code)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below by its name, but NOISE."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.endswith(NOISE)]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A command, the directory that it writes below, and what stands there before it (an empty folder, or a copy)."""

    command: str
    start: str
    words: Sequence[object]
    place: Path
    before: Path
    differs: Sequence[str] = ()
    """Files in which times stand."""
    apart: bool = False
    """Whether its files are read one by one, so that each is the old or the new by itself."""
    is_there: int = 0
    """The exit code of a second run where the first one finished."""

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)

    def run(self, fault: Fault) -> Ended:
        return ended(self.words, self.place, fault)

    def seen(self) -> dict[str, bytes]:
        """What stands there, without what is hidden."""
        return {name: b"" if name in self.differs else content for name, content in tree(self.place).items()
                if not _is_hidden(name) and STATE not in name}  # fmt: skip

    def hidden(self) -> list[str]:
        return [name for name in tree(self.place) if _is_hidden(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario and a fault at each of its points. What stood there afterwards, how often: the old, the new, the old
    put back by whoever reads or writes there next, some files of either, each whole, or a file that is neither (torn).
    `left`: how often hidden files stayed; `wrong`: exit codes, messages and second runs that are not as they should be.
    """

    command: str
    start: str
    fault: str
    operations: int
    tried: int
    old: int
    new: int
    kept: int
    some: int
    torn: int
    left: int
    codes: Mapping[str, int]
    wrong: Sequence[str]


def _state(now: Mapping[str, bytes], old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    if now in (new, old):
        return "new" if now == new else "old"
    return "some" if all(content in (old.get(name), new.get(name)) for name, content in now.items()) else "torn"


def _state_of(scenario: Scenario, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """Of what stands there, and of what is put back of it, which is done to a copy."""
    state = _state(scenario.seen(), old, new)
    journals = list(scenario.place.rglob(FORMER))
    if state in ("old", "new") or not journals:
        return state
    for journal in journals:
        put_back(journal.parent)
    return "kept" if scenario.seen() == old else state


def _wrong(scenario: Scenario, fault: Fault, done: Ended, state: str, new: Mapping[str, bytes]) -> Iterator[str]:
    """What is not as it should be, a second run included."""
    if done.code != fault.code and not (done.code == 0 and state == "new"):
        yield f"exit {done.code}, expected {fault.code}: {done.said[-300:]}"
    if "Traceback" in done.said:
        yield done.said[-600:]
    if state == "torn" or (state == "some" and not scenario.apart):
        yield f"{state}: {_differing(scenario.seen(), new)}"
    again = scenario.run(Fault(name="nothing"))
    if again.code not in ((0, scenario.is_there) if state == "new" else (0,)):
        yield f"the second run: exit {again.code}: {again.said[-300:]}"
    if scenario.seen() != new:
        yield f"the second run made others: {_differing(scenario.seen(), new)}"


def row(scenario: Scenario, fault: Fault, points: Iterable[int] | None = None, times: Sequence[float] = ()) -> Row:
    """The fault at each point from the first on until none is reached, or at some points or times alone."""
    scenario.reset()
    old, hidden = scenario.seen(), set(scenario.hidden())
    whole = scenario.run(Fault(name="nothing"))
    new = scenario.seen()
    kept = set(scenario.hidden()) | hidden
    wrong = [] if whole.code == 0 else [f"undisturbed: exit {whole.code}: {whole.said[-500:]}"]
    states, codes, left = Counter[str](), Counter[str](), 0
    faults = [replace(fault, seconds=seconds) for seconds in times]
    for each in faults or [replace(fault, nth=point) for point in points or range(1, whole.operations + 1)]:
        scenario.reset()
        done = scenario.run(each)
        if done.faults:
            left += bool(set(scenario.hidden()) - kept)
            state = _state_of(scenario, old, new)
            states[state] += 1
            codes[str(done.code)] += 1
            where = f"{each.name} at {each.nth or each.seconds}"
            wrong += [f"{where}: {what}" for what in _wrong(scenario, each, done, state, new)]
    counts = {name: states[name] for name in ("old", "new", "kept", "some", "torn")}
    return Row(
        command=scenario.command, start=scenario.start, fault=fault.name, operations=whole.operations,
        tried=states.total(), **counts, left=left, codes=dict(sorted(codes.items())), wrong=wrong,
    )  # fmt: skip


def _differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def some(most: int, count: int, seed: int = 0) -> list[int]:
    """So many points of so many, drawn."""
    return sorted(random.Random(seed).sample(range(1, most + 1), min(count, most)))


def operations_of(scenario: Scenario) -> int:
    """How many there are undisturbed."""
    scenario.reset()
    return scenario.run(Fault(name="nothing")).operations
