"""The report as Markdown, for a pull request or a terminal: the tables of the page, and no plots."""

from __future__ import annotations

import re

from .content import Content
from .headline import lead, verdicts
from .tables import Table, tables

# What ends a cell or begins a tag, and the backslashes that would undo its own; or what makes a link of a bracket. A
# lone `<` as in `speedup < 1.2` means nothing.
_MARKUP = re.compile(r"(\\*)(\||<(?=[A-Za-z/!?]))|(?<=\])(?=[(\[:])")


def markdown_from_content(content: Content) -> str:
    lines = [f"# {_plain(content.title)}", ""]
    lines += [*(f"**{_plain(stated.words)}** {_plain(stated.why)}  " for stated in verdicts(content)), ""]
    lines += [_plain(lead(content)), ""] if lead(content) else []
    for table in tables(content).values():
        lines += [f"## {_plain(table.title)}", "", *_rows(table), ""]
        lines += [_plain(table.note), ""] if table.note else []
    if content.commands:
        fence = _fence("\n".join(content.commands))
        lines += ["## Commands", "", fence, *content.commands, fence, ""]
    return "\n".join(lines)


def _rows(table: Table) -> list[str]:
    head, *body = (f"| {' | '.join(map(_plain, cells))} |" for cells in (table.columns, *table.rows))
    return [head, "|" + "---|" * len(table.columns), *body]


def _plain(words: str) -> str:
    """One line of which no part is a tag, a link or the end of a cell."""
    return _MARKUP.sub(r"\1\1\\\2", words).replace("\n", " · ")


def _fence(text: str) -> str:
    """Backticks, more of them than stand anywhere in a row in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
