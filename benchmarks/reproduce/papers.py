"""The printed tables of the papers (papers.json): section, columns and rows by paper and table."""

from functools import cache
from pathlib import Path
from typing import Any

from ground.records import record_from_file


@cache
def _papers() -> dict[str, Any]:
    return record_from_file(Path(__file__).with_name("papers.json"), dict[str, Any])


def printed(paper: str, table: str) -> dict[str, Any]:
    """Return a printed table: section, caption, columns, rows and perhaps a note."""
    found: dict[str, Any] = _papers()[paper]["tables"][table]
    return found


def figure(paper: str, number: str) -> str:
    """Return the description of a figure; the papers print no numbers for figures."""
    found: str = _papers()[paper]["figures"][number]
    return found
