"""A table of a report as plain cells, for HTML and Markdown. A line break parts a cell's small print."""

from dataclasses import dataclass

from .numbers import is_number

PAIR = ("Key", "Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`key` is a short name for anchors; the first column holds the row's name."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers alone, and so stand at the right."""
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        return tuple(place > 0 and all(map(is_number, cells)) for place, cells in enumerate(columns))

    @property
    def is_pairs(self) -> bool:
        """Whether it is keys and values alone."""
        return self.columns == PAIR

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.key, self.columns, self.rows)
