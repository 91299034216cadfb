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

HEAD = """# Fuzzed files and invalid calls

`python -m benchmarks.trust.fuzz.page` writes this page from the records of the two scripts below.

## Files

`python -m benchmarks.trust.fuzz` changes valid files at random and gives them to the reader of their kind.
[atheris](https://github.com/google/atheris) changes bytes, guided by the lines of source that a file reaches;
[hypothesis](https://hypothesis.readthedocs.io) changes bytes and values of documents. Digests in a file are corrected
after the change, as an attacker would do. If a file is read, the result is used as a command would use it. A finding is
an exception other than the message of exit code 2, more than 5 CPU seconds, more than 3 GiB of memory, or a file,
process or connection that the reader should not open. *Accepted* counts the files that no check refused (all configs
for the inference server, since their errors are listed instead). `tests/test_fuzz.py` repeats a part of the runs and
keeps each fixed finding as a test case.
"""
CALLS = """
## Calls

`python -m benchmarks.trust.bad_calls` takes a valid call of each command and makes one option, argument or file
invalid: wrong numbers, words, broken documents, pipes, devices, files of another kind, nothing. A fault is an exit code
other than 2 (bad input) or 4 (this machine lacks something), a traceback, no message or a very long one, more than a
minute, or a file that is left behind or changed.
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
    columns = ["reader", "by atheris", "by hypothesis", "accepted", "slowest (CPU s)", "peak (MiB)", "findings"]
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
