"""docs/security/faults.md, of the record of benchmarks.trust.faults.

python -m benchmarks.trust.faults_page
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from benchmarks.pages.markdown import table
from benchmarks.trust.faults import RECORD, ROOT

PAGE = ROOT / "docs" / "security" / "faults.md"
STATES = ("old", "new", "kept", "some", "torn")
COUNTED = ("tried", *STATES, "left")
HEAD = """# What is left where a command is disturbed

`python -m benchmarks.trust.faults --home DIR` disturbs commands and records what stands afterwards; this page is made
of that record by `python -m benchmarks.trust.faults_page`, and a test fails where it is not. A library before the C
library's (`tests/faults.c`) counts what a process opens, writes, syncs, renames and makes below its output, whoever
does it, and lets the Nth fail. After each fault the same command is run again, undisturbed: it has to end well, with
the bytes that it gives when nothing happens at all. (Where every file is as before the fault, that run is the
undisturbed one.)

* **tried**: how often the fault came: at every operation, one after the other until none is left, or at {some} that
  are drawn by a fixed seed, or at {times} moments while the command runs ("at any time").
* **old**, **new**: what stood before, or what was to be made, is there whole. **kept**: the process was killed, or the
  disk failed for good, between two renames of files that belong together; the former ones lie beside in `.former`, and
  whoever loads or writes there next puts them back. **some**: of files that are read one by one, each old or new; an
  older file of held-out moments goes as the new moments come. **torn**: a file that is neither.
* **left**: how often hidden files stayed, of processes that could not remove them. No command takes them for
  anything; where no command is at work they can be removed, but for `.former`.
* **exit**: 4 where the machine fails (its disk, its memory), 2 where a path can't be written to, 130 by SIGINT, 143 by
  SIGTERM, as shells have it; -9 is SIGKILL's; 0 where the command had all but ended, or where a folder could not be
  made that is there already.
* **wrong**: other exit codes, tracebacks, torn or mixed files, second runs that don't end well or with other bytes.

A directory that one process alone may write to has a lock, which the kernel releases when the process ends, however it
ends; no file of it keeps anybody out.
"""


def _codes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{code} ({count})" if len(counts) > 1 else code for code, count in sorted(counts.items()))


def _summed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{sum(row[name] for row in rows):,}" for name in COUNTED] + [str(sum(len(row["wrong"]) for row in rows))]


def _by_fault(rows: Sequence[Mapping[str, Any]]) -> str:
    faults = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in rows:
        faults[row["fault"]].append(row)
    lines = [(fault, *_summed(of_fault)) for fault, of_fault in faults.items()]
    return table(("fault", *COUNTED, "wrong"), [*lines, ("all", *_summed(rows))])


def _of_command(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        (row["start"], row["fault"], str(row["operations"]), *(str(row[name]) for name in COUNTED),
         _codes(row["codes"]), "; ".join(row["wrong"]) or "nothing")
        for row in rows
    ]  # fmt: skip
    return table(("stood there", "fault", "operations", *COUNTED, "exit", "wrong"), lines)


def _happenings(entries: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        (entry["what"], f"`{entry['command']}`", entry["outcome"], ", ".join(map(str, entry["codes"])),
         ", ".join(entry["wrong"]) or "nothing")
        for entry in entries
    ]  # fmt: skip
    return table(("what happens", "to", "outcome", "exit", "wrong"), lines)


def _parts(record: Mapping[str, Any]) -> Iterator[str]:
    from benchmarks.trust.faults import SOME, TIMES

    yield HEAD.format(some=SOME, times=TIMES)
    yield "## All of it\n"
    yield _by_fault(record["rows"]) + "\n"
    yield "## Other processes, memory, disks and clocks\n"
    yield _happenings(record["happenings"]) + "\n"
    commands = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in record["rows"]:
        commands[row["command"]].append(row)
    for command, rows in commands.items():
        yield f"## `{command}`\n"
        yield _of_command(rows) + "\n"


def page(record: Mapping[str, Any]) -> str:
    """docs/security/faults.md."""
    return "\n".join(_parts(record))


@click.command()
def main() -> None:
    """Write docs/security/faults.md."""
    PAGE.write_text(page(json.loads(RECORD.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
