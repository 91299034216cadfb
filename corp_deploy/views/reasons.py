"""Reasons in tables, of one line each: a longer one stands below its table."""

from collections.abc import Iterable

MOST = 40
"""Characters that a cell holds beside others on a terminal."""


def reason_cell(reason: str) -> str:
    """The reason where it is short."""
    return reason if len(reason) <= MOST else "told below"


def reasons_below(named: Iterable[tuple[str, str]]) -> list[str]:
    """The others, a line each, behind the name of their row."""
    return [f"{name}: {reason}" for name, reason in named if len(reason) > MOST]
