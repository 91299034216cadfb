"""docs/security/fuzzing.md, from the records of benchmarks.trust.fuzz and benchmarks.trust.bad_calls.

python -m benchmarks.trust.fuzz.page
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.pages.markdown import table
from ground.files import write_text

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "security" / "fuzzing.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Files and calls of chance

Written by `python -m benchmarks.trust.fuzz.page` from the records beside their scripts.

## Files

`python -m benchmarks.trust.fuzz` gives every reader of foreign files what was a whole file before: bytes changed by
[atheris](https://github.com/google/atheris), which follows the lines of this tool's source that a file reaches, and
values of documents and bytes changed by [hypothesis](https://hypothesis.readthedocs.io). Digests are made right again,
as whoever alters a file can. What was read is used as a command would. A finding is an exception other than the one
message of exit code 2, more than 5 CPU seconds, more than 3 GiB of memory, or anything opened, started or asked that is
none of the reader's own. *Taken* are the files that no check refused; of configs for the inference server all, as their
faults are listed. `tests/test_fuzz.py` repeats a slice, and keeps what was found and mended as cases.
"""
CALLS = """
## Calls

`python -m benchmarks.trust.bad_calls` takes a call of each command that goes well and spoils one option, argument or
file of it: numbers that are none, words, broken documents, pipes, devices, files of another kind, nothing. A fault is
another exit code than 2 (bad input) or 4 (this machine lacks it), a traceback, no message or a book, a minute, a file
left behind or changed.
"""


def _files(record: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, own in record["readers"].items():
        both = list(own.values())
        inputs = [f"{own[driver]['inputs']:,}" if driver in own else "-" for driver in ("atheris", "hypothesis")]
        rows.append(
            [
                name,
                *inputs,
                f"{sum(each['read'] for each in both):,}",
                f"{max(each['slowest_s'] for each in both):.2f}",
                f"{max(each['peak_mib'] for each in both):,}",
                str(sum(len(each["findings"]) for each in both)),
            ]
        )
    return rows


def _calls(record: dict[str, Any]) -> list[list[str]]:
    faulty = [one["command"] for one in record["faulty"]]
    return [
        [
            f"`{name}`",
            str(own["calls"]),
            ", ".join(f"{count} of {code}" for code, count in own["exit_codes"].items()),
            str(faulty.count(name)),
        ]
        for name, own in record["by_command"].items()
    ]


def page() -> str:
    """The whole page."""
    files = json.loads((RESULTS / "fuzz.json").read_text())
    calls = json.loads((RESULTS / "bad_calls.json").read_text())
    columns = ["reader", "by atheris", "by hypothesis", "taken", "slowest (CPU s)", "peak (MiB)", "findings"]
    sums = f"\n{calls['calls']:,} calls, {calls['faults']} faults.\n\n"
    return (
        HEAD
        + "\n"
        + table(columns, _files(files))
        + "\n"
        + CALLS
        + sums
        + table(["command", "calls", "exit codes", "faults"], _calls(calls))
        + "\n"
    )


if __name__ == "__main__":
    write_text(PAGE, page())
