"""What a page shows below a command is what the command prints.

Words have to be the same; what is left out is `...`; numbers may differ by half, as machines and versions of packages
do, but for those in names (blocks.0), and those of digests and versions. A row of a table is looked for among the
table's rows, by its cells.
"""

import re
from dataclasses import dataclass

WIDE = 400  # columns, so that little is wrapped
_DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b")
_VERSION = re.compile(r"(?<![\w.])\d+(?:\.\d+){2,}")
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
_TINY = 1e-4  # errors of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was shown, as a pattern, and its numbers."""

    text: str
    pattern: re.Pattern[str]
    numbers: tuple[float, ...]

    def is_in(self, printed: str, any_numbers: bool) -> bool:
        return any(any_numbers or self._alike(match) for match in self.pattern.finditer(printed))

    def _alike(self, match: re.Match[str]) -> bool:
        return all(alike(shown, _value(now)) for shown, now in zip(self.numbers, match.groups(), strict=True))


def _value(number: str) -> float:
    return abs(float(number.replace(",", "")))


def alike(shown: float, now: float) -> bool:
    """Within half of each other, or both an error of rounding."""
    low, high = sorted((shown, now))
    return low == high or high < _TINY or high <= 1.5 * low


def _line(text: str) -> Line:
    """The pattern of one shown text."""
    pieces, numbers = [], []
    for piece in re.split(r"(\.\.\.)", text):
        if piece == "...":
            pieces.append(".*?")
            continue
        plain = _VERSION.sub("\1", _DIGEST.sub("\0", piece))
        numbers += [_value(found) for found in _NUMBER.findall(plain)]
        escaped = re.escape(_NUMBER.sub("\2", plain))
        for mark, pattern in (("\0", r"[0-9a-f]+"), ("\1", r"[\d.]+"), ("\2", f"({_NUMBER.pattern})")):
            escaped = escaped.replace(re.escape(mark), pattern).replace(mark, pattern)
        pieces.append(escaped)
    return Line(text=text, pattern=re.compile("".join(pieces)), numbers=tuple(numbers))


def _cells(line: str) -> list[str]:
    return [" ".join(cell.split()) for cell in line.strip().strip("│┃").replace("┃", "│").split("│")]


def _rows(lines: list[str]) -> list[str]:
    """Tables' rows, their cells without padding; one that goes on below itself, with an empty first cell, is one."""
    rows: list[list[str]] = []
    for line in lines:
        if not line.lstrip().startswith(("│", "┃")):
            continue
        cells = _cells(line)
        if rows and not cells[0] and len(cells) == len(rows[-1]):
            rows[-1] = [" ".join(part for part in pair if part) for pair in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    return [f"\n│{'│'.join(row)}│" for row in rows]


def lacking(shown: str, output: str, varies: bool = False) -> list[str]:
    """Lines that a page shows below a command and that its output doesn't have.

    What varies from run to run, such as times, may have other numbers, and none of the warnings.
    """
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    lines = [line for line in lines if not (varies and line.startswith("warning: "))]
    rows, text = "".join(_rows(output.splitlines())), " ".join(output.split())
    told = (" ".join(line.split()) for line in lines if not _rows([line]))
    wanted = [(_line(row.replace("│...│", "│...")), rows) for row in _rows(lines)]
    wanted += [(_line(line), text) for line in told]
    return [line.text.strip() for line, printed in wanted if not line.is_in(printed, varies)]
