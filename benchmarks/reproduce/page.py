"""The tables as Markdown, each with what its paper printed."""

from collections.abc import Iterable, Sequence

from .tables import Cell, MadeTable


def _rows(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    shown = [[str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [list(columns), ["---"] * len(columns), *shown]]


def page(title: str, tables: Sequence[MadeTable]) -> str:
    """One page."""
    lines = [f"# {title}", ""]
    for table in tables:
        lines += [f"## {table.title}", "", *_rows(table.columns, table.rows), ""]
        lines += [table.note, ""] if table.note else []
        if table.printed is not None:
            lines += [f"Printed (section {table.printed['section']}): {table.printed['caption']}.", ""]
            lines += [*_rows(table.printed["columns"], table.printed["rows"]), ""]
            lines += [table.printed["note"] + ".", ""] if "note" in table.printed else []
    return "\n".join(lines)
