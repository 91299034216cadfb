"""The tables as Markdown, each next to the printed table."""

from collections.abc import Iterable, Sequence

from benchmarks.pages.markdown import table

from .tables import Cell, MadeTable


def _rows(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    return table(columns, ([str(cell) for cell in row] for row in rows))


def page(title: str, tables: Sequence[MadeTable]) -> str:
    """Return the page of all tables."""
    parts = [f"# {title}"]
    for each in tables:
        parts += [f"## {each.title}", _rows(each.columns, each.rows), each.note]
        if each.printed is not None:
            parts.append(f"Printed (section {each.printed['section']}): {each.printed['caption']}.")
            parts.append(_rows(each.printed["columns"], each.printed["rows"]))
            parts += [f"{each.printed['note']}."] if "note" in each.printed else []
    return "\n\n".join(filter(None, parts)) + "\n"
