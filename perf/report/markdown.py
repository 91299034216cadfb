"""The report as Markdown, for a pull request or a terminal: the tables of the page, and no plots."""

import re

from ground.text import markdown_line

from .content import Content
from .headline import lead, verdicts
from .table import Table
from .tables import tables


def markdown_from_content(content: Content) -> str:
    lines = [f"# {markdown_line(content.title)}", ""]
    lines += [
        *(f"**{markdown_line(stated.headline)}** {markdown_line(stated.why)}  " for stated in verdicts(content)),
        "",
    ]
    lines += [markdown_line(lead(content)), ""] if lead(content) else []
    for table in tables(content).values():
        lines += [*markdown_from_table(table), ""]
    if content.commands:
        fence = _fence("\n".join(content.commands))
        lines += ["## Commands", "", fence, *content.commands, fence, ""]
    return "\n".join(lines)


def markdown_from_table(table: Table) -> list[str]:
    """Lines, from its heading to its note."""
    lines = [f"## {markdown_line(table.title)}", "", *_rows(table)]
    return [*lines, "", markdown_line(table.note)] if table.note else lines


def _rows(table: Table) -> list[str]:
    head, *body = (f"| {' | '.join(map(markdown_line, cells))} |" for cells in (table.columns, *table.rows))
    return [head, "|" + "---|" * len(table.columns), *body]


def _fence(text: str) -> str:
    """Backticks, more of them than stand anywhere in a row in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
