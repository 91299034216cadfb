"""What a reader sees first: the commands by what they are of, the options used first, and all of them when asked."""

import re
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from corp_deploy.cli import GROUPS, RENAMED, main
from corp_deploy.commands.help import Command
from tests.command import invoked
from tests.pages import ROOT

LONG = {name: command for name, command in main.commands.items() if isinstance(command, Command)}
MOMENTS = ROOT / "tests" / "golden" / "0.1" / "moments"


def shown(*words: str, code: int = 0) -> str:
    done = invoked(*words, code=code)
    assert max(map(len, done.stdout.splitlines()), default=0) <= 80
    return done.stdout


def spelled(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def test_the_commands_are_shown_in_groups_of_whole_sentences() -> None:
    text = shown("--help")
    rows = dict(re.findall(r"^  ([a-z][a-z-]+) {2,}(\S.*)$", text, re.MULTILINE))
    assert rows.keys() == {name for name in main.commands if " " not in name}
    assert all(said.endswith(".") and not said.endswith("..") for said in rows.values()), rows
    headings = re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE)
    assert headings == ["Options", "Model", "Reduce", "Graph", "Proof", "Release", "Decoder", "Machine"]
    assert len(rows) <= 20


def test_every_command_is_in_a_group_and_one_of_two_words_in_the_help_of_the_first() -> None:
    assert [each.name for group in GROUPS.values() for each in group] == list(main.commands)
    below = [name for name in main.commands if " " in name]
    assert below
    for name in below:
        assert re.search(rf"^  {name}  ", shown(name.split()[0], "--help"), re.MULTILINE), name
        assert shown(*name.split(), "--help").startswith(f"Usage: main {name} ")


def test_a_command_with_many_options_tells_of_ten() -> None:
    assert {name for name, command in main.commands.items() if len(options(command)) > 12} == LONG.keys()
    assert {"reduce", "calibrate", "export", "verify", "bench", "sweep", "build"} <= LONG.keys()
    for name, command in LONG.items():
        text = shown(name, "--help")
        told = text.partition("\nOptions:\n")[2].partition("\nMore options (--help-all says what they do):\n")[0]
        rows = re.findall(r"^  (?:-\w, )?--([\w-]+)", told, re.MULTILINE)
        assert len(rows) <= 10 + len(("help", "help-all")), name
        assert rows[-2:] == ["help", "help-all"]
        assert {each.name for each in options(command) if each.required} <= set(command.first), name
        assert "Example: corp-deploy" in text
        assert spelled(text) >= {each.opts[0] for each in options(command)}, "the others are named"
        assert len(text.splitlines()) < 80, name


@pytest.mark.parametrize("name", main.commands)
def test_help_all_explains_every_option(name: str) -> None:
    command = main.commands[name]
    text = shown(*name.split(), "--help-all" if name in LONG else "--help")
    letters = "".join(text.split())  # a line may end behind any dash
    for option in options(command):
        rows = [line for line in text.splitlines() if re.match(r" {2}(-\w, )?--", line)]
        assert any(option.opts[0] in spelled(row) for row in rows), option.opts
        assert "".join((option.help or "").split()) in letters, option.opts
    assert "".join((command.help or "").split()) in letters


def test_help_all_has_headings() -> None:
    headings = re.findall(r"^([A-Z][\w, ]+):$", shown("reduce", "--help-all"), re.MULTILINE)
    assert headings[0] == "General"
    assert {"Model", "Widths and method", "Budget", "Sparse weights", "Inputs", "Output"} <= set(headings)
    assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_leads_to_the_new_one_and_says_so(old: str) -> None:
    done = CliRunner().invoke(main, [old, "--help"])
    name, _ = re.subn(" --(batch|random) .*", "", RENAMED[old])
    assert (done.exit_code, done.stdout.startswith(f"Usage: main {name} ")) == (0, True)
    assert done.stderr == f"warning: {old} is deprecated since 0.2 and goes with 0.4; use {RENAMED[old]}\n"
    assert f" {old} " not in shown("--help")


def test_an_old_name_works(tmp_path: Path) -> None:
    """As the new one does, with the flag wherever it stands; what follows is all its own."""
    parts = [str(MOMENTS / name) for name in ("vit.safetensors", "vit.held-out.safetensors")]
    runs = [["merge-moments", *parts], ["calibrate", "--merge", *parts], ["calibrate", *parts, "--merge"]]
    written = []
    for number, words in enumerate(runs):
        done = invoked(*words, "-o", tmp_path / f"{number}.safetensors")
        assert done.stderr.count("deprecated") == (number == 0)
        written.append((tmp_path / f"{number}.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]
    alone = CliRunner().invoke(main, ["merge-moments", parts[0], "-o", str(tmp_path / "no")])
    assert (alone.exit_code, "one file is nothing to merge" in alone.stderr) == (2, True)
    assert CliRunner().invoke(main, ["redundancy", "--moments", parts[0], "--json"]).stdout.startswith("{")


def test_batches_of_an_old_proof_are_its_random_sequences(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text("{}")
    shutil.copytree(tmp_path, tmp_path.with_name("model"))
    words = ["verify-decoder", str(tmp_path.with_name("model")), str(tmp_path), "-o", str(tmp_path / "p.json")]
    done = CliRunner().invoke(main, [*words, "--batch=0"])
    assert (done.exit_code, "'--random'" in done.stderr) == (2, True)
    done = CliRunner().invoke(main, [*words, "--batch", "3", "--seed", "1"])
    assert (done.exit_code, "genai_config.json" in done.stderr) == (2, True)


def test_a_command_that_is_none_is_told() -> None:
    done = CliRunner().invoke(main, ["package", "lint", "--no-such"])
    assert (done.exit_code, "No such option" in done.stderr) == (2, True)
    assert "No such command 'lint'" in CliRunner().invoke(main, ["lint"]).stderr
