"""Escaping of untrusted text, so that it can neither control a terminal nor break a document."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

# Characters that change the direction of the text after them, so that a name looks like another, and line separators.
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
# Characters that control a terminal or that XML can't hold: C0 except tab and newline, DEL, C1, surrogates and two
# noncharacters.
_SHOWN = {
    code: (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
    for code in (*range(32), *range(127, 160), *_TURNS, *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
    if chr(code) not in "\t\n"
}
# Characters that begin a formula in a spreadsheet, of normal and of full width.
_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def printable(text: str) -> str:
    r"""Return a text with control characters, but tab and newline, and changes of direction escaped, such as \x1b."""
    return text.translate(_SHOWN)


LONGEST_WORD, LONGEST_MESSAGE = 300, 3000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def message_line(text: str) -> str:
    """Return a message in printable form, with very long words and very long messages shortened."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} letters)", printable(text))
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE - 600]} ... ({len(text)} letters) ... {text[-500:]}"


def csv_cell(value: object) -> object:
    """Return a printable text that no spreadsheet takes for a formula; other values unchanged."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_cell, row) for row in rows)
    return out.getvalue()


def comment_line(text: str) -> str:
    """Return a text on one line, for a comment that a line break would end."""
    return printable(text).replace("\n", "\\n")


# The end of a cell or the start of a tag, with backslashes that would undo the escape, and the middle of a link. A lone
# `<`, as in `speedup < 1.2`, needs no escape.
_MARKUP = re.compile(r"(\\*)(\||<(?=[A-Za-z/!?]))|(?<=\])(?=[(\[:])")


def markdown_line(text: str) -> str:
    """Return a text as one line of Markdown, with tags, links and ends of table cells escaped."""
    return _MARKUP.sub(r"\1\1\\\2", printable(text)).replace("\n", " · ")
