"""A page of docs/ as its reader follows it: its blocks of commands, Python and files, in order, in one directory.

A comment in front of a block says what is not plain: `<!-- exits: 1 -->` of its commands, `<!-- needs: tensorrt -->`
where they exit with 4 without that package, `<!-- busy: other programs -->` where they may be refused in these words
while others have the machine, `<!-- file: release.toml -->` for a file that the block is written to.
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

import pytest
from click.testing import CliRunner

from corp_deploy.cli import main
from ground.errors import EXIT_BAD_INPUT, EXIT_MISSING

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SHELL = {"cat", "cp", "mkdir", "mv", "openssl", "rm", "sh", "tar"}
_BLOCK = re.compile(
    r"(?P<said>(?:^<!-- [a-z]+: [^\n]* -->\n+)*)^(?P<indent> *)```(?P<kind>\w+)[^\n]*\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_SAID = re.compile(r"<!-- ([a-z]+): ([^\n]*) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block, what kind it is of, and what the comment in front of it says."""

    kind: str
    text: str
    exits: int = 0
    needs: str | None = None
    busy: str | None = None
    file: str | None = None

    @property
    def commands(self) -> list[str]:
        """Its command lines; lines that end with a backslash go on. What is printed between them is left out."""
        lines, joined = [], self.text.replace("\\\n", " ")
        for line in joined.splitlines():
            if line.startswith("$ "):
                lines.append(line.removeprefix("$ "))
        return lines


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        indent = len(match["indent"])
        text = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        said = dict(_SAID.findall(match["said"]))
        assert said.keys() <= {"exits", "needs", "busy", "file"}, (page.name, said)
        found.append(
            Block(
                kind=match["kind"],
                text=text,
                exits=int(said.get("exits", 0)),
                needs=said.get("needs"),
                busy=said.get("busy"),
                file=said.get("file"),
            )
        )
    return found


def pages() -> list[Path]:
    """Every page of docs/."""
    return sorted(DOCS.rglob("*.md"))


def _installs(words: list[str]) -> None:
    """Nothing is installed here: what is named are this package and extras of it."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for word in words:
        if "corp-deploy" in word:
            named = re.fullmatch(r"corp-deploy(?:\[([\w,-]+)\])?", word)
            assert named, word
            assert set((named[1] or "cpu").split(",")) <= extras, word


def _run_outside(words: list[str], line: str, expected: int) -> None:
    """What is no command of ours, as a process of its own that finds this package and its program."""
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    if words[0] == "torchrun":
        program = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    assert words[0] in {"python", "torchrun"} | SHELL, f"{line}: pages run this tool, Python, torchrun and {SHELL}"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, capture_output=True, text=True, env=own, timeout=300, check=False)
    assert done.returncode == expected, f"{line}\n{done.stdout}{done.stderr}"


def run_line(line: str, expected: int, busy: str | None = None) -> None:
    """Run one command line of a page; it has to exit as the page says, or to be refused in the words `busy`."""
    words = shlex.split(line)
    if words[:2] == ["pip", "install"]:
        _installs(words[2:])
    elif words[0] != "corp-deploy":
        _run_outside(words, line, expected)
    else:
        result = CliRunner().invoke(main, words[1:])
        refused = busy is not None and result.exit_code == EXIT_BAD_INPUT and busy in result.output
        assert result.exit_code == expected or refused, f"{line}\n{result.output}"


def _expected(block: Block) -> int:
    absent = block.needs is not None and importlib.util.find_spec(block.needs) is None
    return EXIT_MISSING if absent else block.exits


def follow(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do all that the page shows, in the directory."""
    monkeypatch.chdir(directory)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.kind == "console":
            for line in block.commands:
                run_line(line, _expected(block), block.busy)
        elif block.kind == "python":
            exec(compile(block.text, str(page), "exec"), names)
