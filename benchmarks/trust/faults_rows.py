"""A command and a fault at each of its points: what stands there afterwards, and after a second run."""

import gc
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from ground.transaction import FORMER, roll_back_interrupted
from tests.faults import NOTHING, Ended, Fault, ended, tree

STATES = ("*.partial.*", "sweep/trials/*")
"""Patterns of what a command goes on from where it was interrupted."""


def _all(root: Path) -> dict[str, bytes | None]:
    """The files and the folders."""
    folders = {str(path.relative_to(root)): None for path in root.rglob("*") if path.is_dir()}
    return folders | tree(root)


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
    """Files in which times stand, as patterns."""
    apart: bool = False
    """Whether its files are read one by one, so that each is the old or the new by itself."""
    is_there: int = 0
    """The exit code of a second run where the first one finished."""

    def reset(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.before, self.place)

    def run(self, fault: Fault = NOTHING, *, takes_s: float = 0.0) -> Ended:
        return ended(self.words, self.place, fault, takes_s=takes_s)

    def seen(self) -> dict[str, bytes]:
        """What stands there, without what is hidden."""
        files = {name: content for name, content in tree(self.place).items() if not _is_hidden(name)}
        return {
            name: b"" if any(fnmatch(name, each) for each in self.differs) else content
            for name, content in files.items()
            if not any(fnmatch(name, each) for each in STATES)
        }

    def hidden(self) -> set[str]:
        return {name for name in tree(self.place) if _is_hidden(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """A scenario that nothing happens to: all at its start, what stands before and after it, and what is hidden of
    either; how many operations there are, how long it takes, and what of that is not as it should be.
    """

    scenario: Scenario
    start: Mapping[str, bytes | None]
    old: Mapping[str, bytes]
    new: Mapping[str, bytes]
    kept: Set[str]
    operations: int
    seconds: float
    wrong: Sequence[str]

    @classmethod
    def of(cls, scenario: Scenario) -> "Undisturbed":
        scenario.reset()
        gc.freeze()  # or each process that is forked collects this one's garbage as well
        start, old, kept, begun = _all(scenario.place), scenario.seen(), scenario.hidden(), time.monotonic()
        whole = scenario.run()
        return cls(
            scenario=scenario,
            start=start,
            old=old,
            new=scenario.seen(),
            kept=kept | scenario.hidden(),
            operations=whole.operations,
            seconds=time.monotonic() - begun,
            wrong=[f"undisturbed: exit {whole.code}: {whole.said[-500:]}"] if whole.code else [],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A scenario and a fault at each of its points. What stood there afterwards, how often: the old, the new, the old
    put back by whoever reads or writes there next (kept), some files of either, each whole, or one that is neither
    (torn). `left`: how often hidden files stayed; `wrong`: what is not as it should be, second runs included.
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


def _state(now: Mapping[str, bytes], held: Undisturbed) -> str:
    if now in (held.new, held.old):
        return "new" if now == held.new else "old"
    whole = all(content in (held.old.get(name), held.new.get(name)) for name, content in now.items())
    return "some" if whole else "torn"


def _state_of(held: Undisturbed) -> str:
    """Of what stands there, and of what is put back of it."""
    scenario = held.scenario
    state, journals = _state(scenario.seen(), held), list(scenario.place.rglob(FORMER))
    if state in ("old", "new") or not journals:
        return state
    for journal in journals:
        roll_back_interrupted(journal.parent)
    return "kept" if scenario.seen() == held.old else state


def _wrong(held: Undisturbed, fault: Fault, done: Ended, state: str) -> Iterator[str]:
    """What is not as it should be, a second run included, but where all is as at the start of the undisturbed one."""
    scenario = held.scenario
    finished = state == "new" and done.code in (0, -fault.signal)
    if done.code != fault.code and not finished:
        yield f"exit {done.code}, expected {fault.code}: {done.said[-300:]}"
    if "Traceback" in done.said:
        yield done.said[-600:]
    if state == "torn" or (state == "some" and not scenario.apart):
        yield f"{state}: {_differing(scenario.seen(), held.new)}"
    if _all(scenario.place) == held.start:
        return
    again = scenario.run()
    if again.code not in ((0, scenario.is_there) if state == "new" else (0,)):
        yield f"the second run: exit {again.code}: {again.said[-300:]}"
    if scenario.seen() != held.new:
        yield f"the second run made others: {_differing(scenario.seen(), held.new)}"


def _faults(fault: Fault, points: Iterable[int] | None, shares: Sequence[float]) -> Iterable[Fault]:
    if shares:
        return (replace(fault, share=share) for share in shares)
    return (replace(fault, nth=point) for point in (count(1) if points is None else points))


def row(held: Undisturbed, fault: Fault, points: Iterable[int] | None = None, shares: Sequence[float] = ()) -> Row:
    """The fault at each point until none is reached; or at some points; or after shares of the command's time."""
    scenario, wrong = held.scenario, list(held.wrong)
    states, codes, left = Counter[str](), Counter[str](), 0
    for each in _faults(fault, points, shares):
        scenario.reset()
        done = scenario.run(each, takes_s=held.seconds)
        if not done.faults and not shares:
            break
        left += bool(scenario.hidden() - held.kept)
        state = _state_of(held)
        states[state] += 1
        codes[str(done.code)] += 1
        where = f"{each.name} at {each.nth or each.share}"
        wrong += [f"{where}: {what}" for what in _wrong(held, each, done, state)]
    counts = {name: states[name] for name in ("old", "new", "kept", "some", "torn")}
    every = points is None and not shares
    return Row(
        command=scenario.command, start=scenario.start, fault=fault.name, tried=states.total(), **counts, left=left,
        operations=states.total() if every else held.operations, codes=dict(sorted(codes.items())), wrong=wrong,
    )  # fmt: skip


def _differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def some(most: int, count: int, seed: int = 0) -> list[int]:
    """So many points of so many, drawn."""
    return sorted(random.Random(seed).sample(range(1, most + 1), min(count, most)))
