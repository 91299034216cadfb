"""A page of docs/ as its reader follows it: its blocks of commands, Python and files, in order, in one directory.

Several processes are one here: what starts them is tested elsewhere, and it changes neither what is printed nor which
files there are.

A comment in front of a block says what is not plain: `<!-- exits: 1 -->` of its commands, `<!-- needs: tensorrt -->`
where the first exits with 4 without that package and the others are left out, `<!-- busy: other programs -->` where
they may be refused, or inconclusive, in these words while others have the machine, `<!-- varies: times -->` where what
is printed has other numbers each time, `<!-- file: release.toml -->` for a file that the block is written to.

What is shown below a command has to be printed by it. Words have to be the same; what is left out is `...`; numbers may
differ by half, as machines and versions of packages do, but for those in names (blocks.0), and those of digests and
versions. A row of a table is looked for among the table's rows, by its cells.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from ground.errors import EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, EXIT_MISSING

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHELL = {"cat", "cp", "mkdir", "mv", "openssl", "rm", "sh", "tar"}
_BLOCK = re.compile(
    r"(?P<said>(?:^<!-- [a-z]+: [^\n]* -->\n+)*)^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_SAID = re.compile(r"<!-- ([a-z]+): ([^\n]*) -->")
WIDE = 400  # columns, so that little is wrapped
_DIGEST = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b")
_VERSION = re.compile(r"(?<![\w.])\d+(?:\.\d+){2,}")
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
_TINY = 1e-4  # errors of rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block, what kind it is of, and what the comment in front of it says."""

    kind: str
    text: str
    exits: int = 0
    needs: str | None = None
    busy: str | None = None
    varies: str | None = None
    file: str | None = None

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Its command lines, each with what is shown to be printed; lines that end with a backslash go on."""
        _, *parts = re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.MULTILINE)
        return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]

    @property
    def commands(self) -> list[str]:
        """Its command lines alone."""
        return [command for command, _ in self.steps]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        indent = len(match["indent"])
        text = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        said = dict(_SAID.findall(match["said"]))
        assert said.keys() <= {"exits", "needs", "busy", "varies", "file"}, (page.name, said)
        found.append(
            Block(
                kind=match["kind"], text=text, exits=int(said.get("exits", 0)), needs=said.get("needs"),
                busy=said.get("busy"), varies=said.get("varies"), file=said.get("file"),
            )
        )  # fmt: skip
    return found


def pages() -> list[Path]:
    """Every page of docs/."""
    return sorted(DOCS.rglob("*.md"))


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


def _installs(words: list[str]) -> str:
    """Nothing is installed or printed here: what is named are this package and extras of it."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for word in words:
        if "corp-deploy" in word:
            named = re.fullmatch(r"corp-deploy(?:\[([\w,-]+)\])?", word)
            assert named, word
            assert set((named[1] or "cpu").split(",")) <= extras, word
    return ""


def _run_outside(words: list[str], line: str, expected: int) -> str:
    """What is no command of ours, as a process of its own that finds this package and its program. What it prints."""
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    assert words[0] in {"python"} | SHELL, f"{line}: pages run this tool, Python, torchrun and {SHELL}"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    modules = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    own = os.environ | {"PYTHONPATH": modules, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=own, timeout=300, check=False)
    assert done.returncode == expected, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _alone(line: str) -> str:
    """A command line by one process."""
    line = re.sub(r"^torchrun (?:--[\w-]+ \d+ )+-m corp_deploy ", "corp-deploy ", line)
    return re.sub(r"--jobs \d+", "--jobs 1", line)


def run_line(line: str, expected: int, busy: str | None = None) -> str | None:
    """What a command line of a page prints; it has to exit as the page says. None if refused in the words `busy`."""
    words = shlex.split(_alone(line))
    if words[:2] == ["pip", "install"]:
        return _installs(words[2:])
    if words[0] != "corp-deploy":
        return _run_outside(words, line, expected)
    wide = mock.patch("corp_deploy.views.console.WIDTH_WITHOUT_TERMINAL", WIDE)
    with wide, mock.patch.object(sys, "argv", words):
        result = CliRunner().invoke(main, words[1:])
    if busy is not None and result.exit_code in (EXIT_BAD_INPUT, EXIT_INCONCLUSIVE) and busy in result.output:
        return None
    assert result.exit_code == expected, f"{line}\n{result.output}"
    return result.output


def _follow(block: Block) -> None:
    """Run its commands and hold what each prints against what is shown."""
    lacks = block.needs is not None and importlib.util.find_spec(block.needs) is None
    for line, shown in block.steps[: 1 if lacks else None]:
        printed = run_line(line, EXIT_MISSING if lacks else block.exits, block.busy)
        if printed is not None and (not lacks or (block.exits == 0 and shown.startswith("Error: "))):
            absent = lacking(shown, printed, varies=block.varies is not None)
            assert not absent, f"{line}\nis shown to print\n{chr(10).join(absent)}\nand prints\n{printed}"


def follow(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do all that the page shows, in the directory."""
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "console":
            _follow(block)
        elif block.kind == "python":
            exec(compile(block.text, str(page), "exec"), names)
