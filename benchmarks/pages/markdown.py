"""Tables of Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from string import Formatter
from typing import Any

Row = Mapping[str, Any]
Column = str | Callable[[Row], str]
"""A format of a row's fields, "{error:.4f}", or a function of the row."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


class _WithDashes(Formatter):
    """A formatter that shows None as a dash."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


_FORMATTER = _WithDashes()


def cell(row: Row, column: Column) -> str:
    """Return the text of a row in a column."""
    return column(row) if callable(column) else _FORMATTER.vformat(column, (), row)


def table_of(rows: Iterable[Row], columns: Mapping[str, Column]) -> str:
    """Return a table with a line for each row of a record."""
    return table(list(columns), ([cell(row, column) for column in columns.values()] for row in rows))


def cross_table(
    rows: Iterable[Row], first: Mapping[str, Column], head: Column, column: Column, order: Iterable[str] | None = None
) -> str:
    """Return a table with a column for each heading that `head` gives to rows, and dashes where there is no row.

    Rows with equal texts in the `first` columns share a line. `order` lists the headings, by default as rows have them.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(cell(row, each) for each in first.values()), {})
        line[cell(row, head)] = cell(row, column)
    heads = list(dict.fromkeys(each for line in lines.values() for each in line) if order is None else order)
    return table(
        [*first, *heads], ([*start, *(line.get(each, "-") for each in heads)] for start, line in lines.items())
    )


def mean_rows(rows: Iterable[Row], by: Sequence[str], figures: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each value of the fields `by`, with the means of these figures."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [
        dict(zip(by, key, strict=True)) | {name: mean(row[name] for row in group) for name in figures}
        for key, group in groups.items()
    ]


def paragraphs(*parts: str) -> str:
    """Return the parts that are not empty, with blank lines between them."""
    return "\n\n".join(filter(None, parts))


def interval(value: Sequence[float | None] | None, digits: int = 2, *, unknown: str = "") -> str:
    """Return a figure with its interval, or with `unknown` where too few rounds gave none."""
    if value is None or value[0] is None:
        return "-"
    middle, low, high = (None if each is None else f"{each:,.{digits}f}" for each in value)
    return f"{middle}{unknown}" if low is None or high is None else f"{middle} ({low} to {high})"


def interval_of(field: str, digits: int = 2) -> Callable[[Row], str]:
    """Return a column of a field that holds an interval; "p50_ms.dense" names an inner field."""

    def shown(row: Row) -> str:
        value: Any = row
        for name in field.split("."):
            value = value[name]
        return interval(value, digits)

    return shown
