"""Outputs that can't be written are refused before any work, by the path that was typed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import click
import pytest

import corp_deploy
from corp_deploy.cli import main
from corp_deploy.invocation.option import WRITTEN
from ground.errors import BadInput, Missing
from ground.outputs import require_space, require_writable
from tests import tiny
from tests.command import refuses, run

MODEL, INPUTS = ("--model", "m"), ("--images", "x.npy")
PROVED = ("verify", "m", "c.onnx", *INPUTS)
CALIBRATED = ("calibrate", *MODEL, *INPUTS)
COMMANDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("calibrate", "output"): (*CALIBRATED, "-o"),
    ("calibrate", "summary"): (*CALIBRATED, "-o", "m.safetensors", "--summary"),
    ("calibrate --merge", "output"): ("calibrate", "--merge", "a", "b", "-o"),
    ("inspect redundancy", "output"): ("inspect", "redundancy", "--moments", "x", "-o"),
    ("reduce", "output"): ("reduce", *MODEL, "--moments", "x", "--mlp", "0.5", "-o"),
    ("reduce", "latency_tables"): (
        *("reduce", *MODEL, *INPUTS, "--moments", "x", "-o", "r", "--latency", "0.6", "--latency-tables"),
    ),
    ("latency-table", "output"): ("latency-table", *MODEL, "-o"),
    ("sweep", "output"): ("sweep", *MODEL, *INPUTS, "--moments", "x", "--sparsity", "0.5", "-o"),
    ("export", "output"): ("export", *MODEL, "-o"),
    ("build", "output"): ("build", "m.onnx", "-o"),
    ("build", "timing_cache"): ("build", "m.onnx", "-o", "m.plan", "--backend", "tensorrt", "--timing-cache"),
    ("audit", "output"): ("audit", "a.onnx", "b.onnx", "-o"),
    ("verify", "output"): (*PROVED, "-o"),
    ("verify", "polygraphy"): (*PROVED, "-o", "p.json", "--polygraphy"),
    ("verify", "write_golden"): ("verify", "m.onnx", *INPUTS, "--write-golden"),
    ("bench", "output"): ("bench", "a.onnx", "b.onnx", "-o"),
    ("gate", "output"): ("gate", "bench.json", "--fail-if", "p50@b1 > 1", "-o"),
    ("gate", "history"): ("gate", "bench.json", "--history"),
    ("gate", "track"): ("gate", "bench.json", "--track"),
    ("gate", "metrics"): ("gate", "bench.json", "--metrics"),
    ("gate", "path"): ("gate", "bench.json", "--init-baseline", "--baseline"),
    ("report", "output"): ("report", "records", "-o"),
    ("ship", "output"): ("ship", "m", *INPUTS, "-o"),
    ("ship", "latency_tables"): ("ship", "m", *INPUTS, "-o", "s", "--latency", "0.6", "--latency-tables"),
    ("release", "output"): ("release", "r.toml", "-o"),
    ("release", "recipe"): ("release", "--init", "m"),
    ("package", "output"): ("package", "results", "-o"),
    ("package lint", "output"): ("package", "lint", "repository", "-o"),
    ("package serve", "repository"): ("package", "serve", "--model-version", "1"),
    ("perplexity", "output"): ("perplexity", "m", "c", "--text", "x", "-o"),
    ("export-decoder", "output"): ("export-decoder", "d", "-o"),
    ("demo", "output"): ("demo", "-o"),
}  # fmt: skip


def test_every_output_option_is_tested() -> None:
    found = {(name, str(each.name)) for name, command in main.commands.items() for each in command.params}
    assert {(name, option) for name, option in found if option in WRITTEN} <= set(COMMANDS)


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which no file can be made, whoever runs the tests; no command gets as far as its work."""
    folder = tmp_path / "sealed"
    folder.mkdir()

    def temporary(*, dir: Path) -> object:
        if dir == folder:
            raise PermissionError(13, "Permission denied")
        return TemporaryFile(dir=dir)

    monkeypatch.setattr("ground.outputs.TemporaryFile", temporary)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unwritable_folder_is_refused_first(command: tuple[str, str], sealed: Path) -> None:
    place = sealed / "new.json"
    refuses(f"{place}: can't be written in {sealed} (Permission denied); give another path", *COMMANDS[command], place)
    assert list(sealed.iterdir()) == []


@pytest.mark.parametrize("command", [each for each in COMMANDS if each[0] not in ("release", "package serve")])
def test_file_in_place_of_a_folder_is_refused_first(command: tuple[str, str], tmp_path: Path) -> None:
    file, folder = tmp_path / "file.json", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    refuses("which is no directory", *COMMANDS[command], file / "below.json")
    params = next(each for each in main.commands[command[0]].params if each.name == command[1])
    assert isinstance(params.type, click.Path)
    refuses("is a directory" if params.type.dir_okay is False else "is a file",
            *COMMANDS[command], folder if params.type.dir_okay is False else file)  # fmt: skip


@pytest.mark.parametrize(("words", "beside"), [
    ((*PROVED, "-o", "p.json"), "p.npz"),
    ((*CALIBRATED, "--hold-out", "4", "-o", "m.safetensors"), "m.held-out.safetensors"),
    (("reduce", *MODEL, "--moments", "x", "--mlp", "0.5", "-o", "r"), "r/config.json"),
    (("build", "m.onnx", "-o", "m.plan"), "m.plan.json"),
], ids=lambda each: each if isinstance(each, str) else each[0])  # fmt: skip
def test_folder_in_place_of_a_companion_file_is_refused_first(
    words: tuple[str, ...], beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / beside).mkdir(parents=True)
    refuses(f"{beside}: a directory, expected a regular file", *words)


def test_polish_needs_the_folder_of_its_state(sealed: Path) -> None:
    (sealed / "r").mkdir()
    words = ("reduce", *MODEL, "--moments", "x", "--mlp", "0.5", "-o", sealed / "r")
    said = "r.polish-unfinished.safetensors: can't be written in"
    refuses(said, *words, *INPUTS, "--polish", "layer")
    assert said not in run(*words).stderr


def test_dry_run_needs_no_writable_folder(sealed: Path, tmp_path: Path) -> None:
    refuses("r.toml: no such recipe", "release", tmp_path / "r.toml", "--dry-run", "-o", sealed / "out")


@contextmanager
def as_another_user() -> Iterator[None]:
    """Within it root is a user whom permissions bind; others are bound by them anyway."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(54321)
    try:
        yield
    finally:
        os.seteuid(user)


def test_permissions_are_checked_by_the_system(tmp_path: Path) -> None:
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(0o755)
    closed, hidden = tmp_path / "closed", tmp_path / "hidden"
    closed.mkdir(mode=0o555)
    (hidden / "inner").mkdir(parents=True)
    hidden.chmod(0o600)
    with as_another_user():
        for path in (closed / "a.json", closed / "new" / "a.json", hidden / "inner" / "a.json"):
            for folder in (False, True):
                with pytest.raises(BadInput, match=r"can't be written in .*\(Permission denied\)"):
                    require_writable(path, folder=folder)
    hidden.chmod(0o700)


def test_unwritable_names_and_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, said in (
        (tmp_path / ("x" * 250), "File name too long"),  # a temporary file's name is longer
        (tmp_path / ("x" * 256) / "y", "File name too long"),
        (tmp_path / "dangling" / "y", "a dangling link"),
        (tmp_path / "loop" / "y", "a dangling link"),
    ):
        with pytest.raises(BadInput, match=said):
            require_writable(path, folder=False)
    require_writable(tmp_path / "dangling", folder=False)  # the link is replaced
    require_writable(tmp_path / "a" / "b" / "c.json", folder=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "loop"], "nothing is left"


def test_full_disk_is_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*, dir: Path) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ground.outputs.TemporaryFile", full)
    refuses(f"{tmp_path / 'b.json'}: the disk is full", "bench", "a.onnx", "b.onnx", "-o", tmp_path / "b.json", code=4)


def test_insufficient_space_is_reported_with_both_figures(tmp_path: Path) -> None:
    require_space(tmp_path / "new" / "x", 1, what="the moments take")
    with pytest.raises(Missing, match=r"x: the moments take about 1,073,741,824 MiB, and the disk has [\d,]+ MiB free"):
        require_space(tmp_path / "new" / "x", 2.0**50, what="the moments take")


def test_calibration_checks_the_space_for_all_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(
        "corp_deploy.reduction.moments_files.require_space", lambda path, size_bytes, what: asked.append(size_bytes)
    )
    images = tiny.images(8)
    moments = corp_deploy.calibrate(tiny.checkpoint().model, images, tmp_path / "one.safetensors")
    corp_deploy.calibrate(tiny.checkpoint().model, images, tmp_path / "two.safetensors", hold_out=4, groups="image")
    assert asked[0] <= moments.path.stat().st_size <= 1.2 * asked[0]
    assert asked[1] == 4 * asked[0]


def test_functions_refuse_bad_outputs_before_opening_inputs(sealed: Path) -> None:
    place, absent = sealed / "x", "absent"
    calls = (
        lambda: corp_deploy.calibrate(absent, absent, place),
        lambda: corp_deploy.reduce(absent, absent, place, mlp=0.5),
        lambda: corp_deploy.export(absent, place),
        lambda: corp_deploy.verify(absent, absent, absent, output=place),
        lambda: corp_deploy.bench(absent, absent, output=place),
    )
    for call in calls:
        with pytest.raises(BadInput, match="can't be written in"):
            call()
