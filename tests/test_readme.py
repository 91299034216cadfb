"""The README's command block runs as it stands, and its tables are those of the records."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.readme_tables import readme_with_tables
from corp_deploy.cli import main
from examples.digits.images import load

ROOT = Path(__file__).parents[1]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line.removeprefix("$ ")) for line in lines]


def test_the_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    np.savez(tmp_path / "images.npz", images=load("train").images[:128])
    monkeypatch.chdir(tmp_path)
    assert len(commands()) >= 9
    for program, *words in commands():
        assert program == "corp-deploy", program
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, f"{words}: {result.output}"


def test_every_command_is_in_the_readme() -> None:
    shown = {words[1] for words in commands()}
    text = (ROOT / "README.md").read_text()
    assert {
        name for name in main.commands if name not in shown and f"`{name}`" not in text and f"make {name}" not in text
    } == set()


def test_the_tables_are_those_of_the_records() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme_with_tables(text) == text
