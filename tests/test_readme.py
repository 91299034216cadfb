"""The README's commands and Python run as they stand, and its figures and those of docs/ are those of the records."""

import re
import shlex
from pathlib import Path

import click
import numpy as np
import pytest

from benchmarks.pages.measured import BEGIN, PAGES, contents, with_records
from benchmarks.pages.pictures import DRAWINGS, PICTURES
from corp_deploy.cli import main
from examples.digits.images import load_part
from tests.pages import ROOT, blocks, follow

README = ROOT / "README.md"


def commands() -> list[list[str]]:
    return [shlex.split(line) for block in blocks(README) if block.kind == "console" for line in block.commands]


@pytest.mark.slow("graph")
def test_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    np.savez(tmp_path / "images.npz", images=load_part("train").images[:128])
    np.savez(tmp_path / "held-out.npz", images=load_part("held-out").images)
    assert len(commands()) >= 9
    assert sum(block.kind == "python" for block in blocks(README)) == 1
    follow(README, tmp_path, monkeypatch)


def test_readme_names_every_command() -> None:
    shown = {main.resolve_command(click.Context(main), words[1:])[0] for words in commands()}
    text = README.read_text()
    assert {name for name in main.commands if name not in shown and f"`{name}`" not in text} == set()


def test_readme_takes_three_minutes() -> None:
    """At 240 words a minute, but for blocks and tables."""
    prose = re.sub(r"```.*?```|^\|.*?$", "", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= 720


@pytest.mark.parametrize("page", contents())
def test_tables_follow_the_records(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_records(text, contents()[page]) == text, "run python -m benchmarks.pages.measured"


def test_every_record_with_a_table_exists() -> None:
    for page, tables in PAGES.items():
        for name in tables:
            assert (ROOT / "benchmarks" / "results" / name).is_file(), (page, name)
    marked = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md") if BEGIN in path.read_text()}
    assert marked == set(contents())


@pytest.mark.parametrize("name", DRAWINGS)
def test_pictures_follow_the_records(name: str) -> None:
    drawn = DRAWINGS[name]().standalone
    assert (PICTURES / name).read_text(encoding="utf-8") == drawn, "run python -m benchmarks.pages.pictures"
    assert len(drawn) < 40_000


def test_every_picture_has_a_source() -> None:
    assert {path.name for path in PICTURES.iterdir()} == {*DRAWINGS, "parity-chain.svg", "pipeline.svg"}
