"""Calls that can't go well: each ends with exit code 2 and one message, at once, and leaves every file as it was."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from corp_deploy.checkpoint import save
from corp_deploy.cli import main
from corp_deploy.commands.options import RegularPath
from tests import tiny


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What waits for a pipe or reads a device without end is interrupted."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    save(tiny.checkpoint(), root / "dense")
    np.save(root / "images.npy", tiny.images(12))
    done = run("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / "m.safetensors")
    assert done.exit_code == 0, done.output
    return root


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(result: Result, *said: str) -> None:
    """Exit code 2, one message of a size that can be read, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    message = result.stderr.partition("Error: ")[2]
    assert message.strip(), result.stderr
    assert len(result.stderr) < 3000, "what was given is not echoed whole"
    for words in said:
        assert words in result.stderr, result.stderr


def tree(folder: Path) -> dict[str, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


# Pipes, devices and links to them

PATHS = [
    (name, each)
    for name, command in sorted(main.commands.items())
    for each in command.params
    if isinstance(each.type, click.Path)
]


def special(folder: Path, kind: str) -> Path:
    path = folder / "special"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_no_command_takes_a_pipe_or_a_device(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)
    assert len(PATHS) >= 60
    for command, parameter in PATHS:
        assert isinstance(parameter.type, RegularPath), (command, parameter.name)
        option = [] if isinstance(parameter, click.Argument) else [parameter.opts[0]]
        words = [command, *(["x"] if (command, parameter.name) == ("verify", "candidates") else []), *option, path]
        others = [] if isinstance(parameter, click.Argument) and parameter.nargs == -1 else [path] * 2
        refused(run(*words, *(others if not option else [])), "special is a pipe, socket or device")
    assert path.is_fifo() if kind == "pipe" else path.readlink() == Path("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_a_picture_that_is_no_file_is_a_bad_picture(home: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    special(folder, kind).rename(folder / "a.png")
    Image.new("RGB", (40, 40)).save(folder / "b.png")
    words = ["calibrate", "--model", home / "dense", "--images", folder, "-o", tmp_path / "m.safetensors"]
    refused(run(*words), "a.png: a pipe, socket or device")
    assert run(*words, "--max-bad", 1).exit_code == 0


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_files_below_a_directory_are_regular_too(home: Path, tmp_path: Path, kind: str) -> None:
    for name in ("SHA256SUMS", "bench.json", "parity.json", "config.json"):
        (tmp_path / name).mkdir()
        special(tmp_path / name, kind).rename(tmp_path / name / name)
    (tmp_path / "recipe.toml").write_text('extends = "SHA256SUMS/SHA256SUMS"\n')
    refused(run("check", tmp_path / "SHA256SUMS"), "SHA256SUMS: a pipe, socket or device")
    refused(run("release", tmp_path / "recipe.toml", "-o", tmp_path / "r"), ": a pipe, socket or device")
    refused(run("inspect", "--model", tmp_path / "config.json"), "config.json: a pipe, socket or device")
    for name in ("bench.json", "parity.json"):
        refused(run("report", tmp_path / name, "-o", tmp_path / "r.html"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_what_is_written_below_a_directory_replaces_regular_files_alone(home: Path, tmp_path: Path, kind: str) -> None:
    special(tmp_path, kind).rename(tmp_path / "model.safetensors")
    words = ["--model", home / "dense", "--moments", home / "m.safetensors", "--mlp", 0.5, "-o", tmp_path]
    refused(run("reduce", *words), "model.safetensors: a pipe, socket or device")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors").is_file()
