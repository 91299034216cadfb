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
HEAD = """# What an interrupted or failing command leaves behind

`python -m benchmarks.trust.faults --home DIR` makes commands fail and records which files exist afterwards. `python -m
benchmarks.trust.faults_page` writes this page from the record, and a test fails if the two differ. A preloaded library
(`tests/faults.c`) counts every open, write, sync, rename and mkdir below the output directory, in every process of the
command, and makes the Nth one fail. After each fault the same command runs again without a fault: it must succeed, and
write the same bytes as a run that never failed. (If the fault changed no file, an undisturbed run serves as the second
run.)

* **tried**: how many faults were injected: at every operation in turn, or at {some} operations drawn with a fixed seed,
  or at {times} moments while the command runs ("at any time").
* **old**, **new**: the previous files, or the new ones, are complete. **kept**: the process was killed, or the disk
  failed for good, between two renames of files that belong together; the previous files are in `.former`, and the next
  command that reads or writes there restores them. **some**: of files that are read separately, each is old or new; an
  old file of held-out moments is removed when the new moments are written. **torn**: a file that is neither.
* **left**: how often hidden files remained because the process could not remove them. Commands ignore them; you can
  delete them when no command is running, except `.former`.
* **exit**: 4 if the machine fails (disk, memory), 2 if a path can't be written, 130 for SIGINT, 143 for SIGTERM, -9 for
  SIGKILL; 0 if the command had nearly finished, or if the folder that could not be made already existed.
* **wrong**: other exit codes, tracebacks, torn or mixed files, and second runs that fail or write other bytes.

A directory that only one process may write to has a lock. The kernel releases it when the process ends, for whatever
reason, so that a file left behind never blocks the next command.
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
    yield "## All faults\n"
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
