"""Text from outside, made fit to show: a name must neither drive a terminal nor break a document."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

# What turns the order of the letters behind it about, so that a name reads as another, and what ends a line unseen.
_TURNS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
# What a terminal would obey in place of showing it, and what XML has no way to hold: C0 but for tabulator and new line,
# DEL, C1, halves of surrogate pairs, the two noncharacters.
_SHOWN = {
    code: (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")
    for code in (*range(32), *range(127, 160), *_TURNS, *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)
    if chr(code) not in "\t\n"
}
# What a spreadsheet takes for the beginning of a formula, in either width of letters.
_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def printable(text: str) -> str:
    """The text with its control characters, and those that turn its direction, written out as \\x1b."""
    return text.translate(_SHOWN)


LONGEST_WORD, LONGEST_MESSAGE = 300, 3000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def message_line(text: str) -> str:
    """A message that can be read, printable: words that nobody typed by hand are cut, and what is left of a book."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:100]}... ({len(word[0])} letters)", printable(text))
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE - 600]} ... ({len(text)} letters) ... {text[-500:]}"


def csv_cell(value: object) -> object:
    """A text as no spreadsheet computes with it, printable; what is no text as it is."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(_FORMULA) else printable(value)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows, the header's first, as CSV of such cells."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(csv_cell, row) for row in rows)
    return out.getvalue()


def comment_line(text: str) -> str:
    """The text as it can stand in a comment, which a line break would end."""
    return printable(text).replace("\n", "\\n")


# What ends a cell or begins a tag, and the backslashes that would undo its own; or what makes a link of a bracket. A
# lone `<` as in `speedup < 1.2` means nothing.
_MARKUP = re.compile(r"(\\*)(\||<(?=[A-Za-z/!?]))|(?<=\])(?=[(\[:])")


def markdown_line(text: str) -> str:
    """The text as one line of Markdown of which no part is a tag, a link or the end of a table's cell."""
    return _MARKUP.sub(r"\1\1\\\2", printable(text)).replace("\n", " · ")
