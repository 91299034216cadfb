"""Tables of Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

Column = str | Callable[[Mapping[str, Any]], str]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


class _WithDashes(Formatter):
    """A formatter that shows None as a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


def table_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Column]) -> str:
    """Return a table of a record's rows; a column is a format of a row's fields ("{error:.4f}") or a function."""
    formatter = _WithDashes()
    lines = (
        [column(row) if callable(column) else formatter.vformat(column, (), row) for column in columns.values()]
        for row in rows
    )
    return table(list(columns), lines)


def interval(value: Sequence[float | None] | None, digits: int = 2) -> str:
    """Return a figure with the ends of its interval, without those where there were too few rounds for them."""
    if value is None or value[0] is None:
        return "-"
    middle, low, high = (None if each is None else f"{each:,.{digits}f}" for each in value)
    return f"{middle}" if low is None or high is None else f"{middle} ({low} to {high})"
