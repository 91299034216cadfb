"""What the papers printed, as data (papers.json): paper, table, section, columns, rows."""

from functools import cache
from pathlib import Path
from typing import Any

from ground.records import record_from_file


@cache
def _papers() -> dict[str, Any]:
    return record_from_file(Path(__file__).with_name("papers.json"), dict[str, Any])


def printed(paper: str, table: str) -> dict[str, Any]:
    """A table as it was printed: section, caption, columns, rows, and a note where there is one."""
    found: dict[str, Any] = _papers()[paper]["tables"][table]
    return found


def figure(paper: str, number: str) -> str:
    """What a figure shows; the papers' figures print no numbers."""
    found: str = _papers()[paper]["figures"][number]
    return found
