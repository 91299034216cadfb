"""The command line: help without torch, exit codes, one message for each mistake, no partial output."""

import json
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import click
import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file

import corp_deploy
from corp_deploy.cli import GROUPS, main
from corp_deploy.commands.help import Command
from corp_deploy.store.checkpoint import save
from tests import tiny
from tests.command import invoked, refused, refuses, run
from tests.pages import ROOT

COMMANDS = sorted(main.commands)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dense model directory, its weights as a file, images and moments."""
    root = tmp_path_factory.mktemp("home")
    checkpoint = tiny.checkpoint()
    save(checkpoint, root / "dense")
    save_file(checkpoint.model.state_dict(), root / "weights.safetensors")
    np.save(root / "images.npy", tiny.images(12))
    invoked("calibrate", "--model", root / "dense", "--images", root / "images.npy", "-o", root / "moments.safetensors")
    return root


def reduce(home: Path, output: Path, *extra: object, **changes: object) -> Result:
    options = {"model": home / "dense", "moments": home / "moments.safetensors", "output": output} | changes
    return run("reduce", *(word for name, value in options.items() for word in (f"--{name}", value)), *extra)


HEAVY = ("torch", "timm", "onnx", "onnxruntime", "onnxscript", "numpy", "scipy", "PIL", "safetensors", "transformers")
HELP_OF_ALL = f"""
import json, sys
for name in {HEAVY!r}: sys.modules[name] = None
from click.testing import CliRunner
from corp_deploy.cli import main
runs = {{name: CliRunner().invoke(main, [*words, "--help"]) for name, words in json.loads(sys.argv[1]).items()}}
print(json.dumps({{name: [run.exit_code, run.stdout] for name, run in runs.items()}}))
"""


def test_help_imports_nothing_heavy_and_shows_an_example() -> None:
    calls = {"": [], **{name: name.split() for name in COMMANDS}}
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL, json.dumps(calls)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    shown = json.loads(done.stdout)
    assert shown.keys() == calls.keys()
    for name, (code, text) in shown.items():
        assert code == 0, (name, text)
        assert "Usage:" in text
        assert not name or "Example: corp-deploy" in text, name


def test_command_functions_take_few_parameters() -> None:
    many = {name for name, command in main.commands.items() if len(signature(command.callback).parameters) > 9}  # type: ignore[arg-type]
    assert not many


@pytest.mark.slow("graph")
def test_from_a_timm_name_to_a_report(home: Path, tmp_path: Path) -> None:
    kwargs = json.dumps(dict(tiny.ARCHITECTURE.kwargs))
    named = ["--model", tiny.ARCHITECTURE.name, "--weights", home / "weights.safetensors", "--model-kwargs", kwargs]
    moments, reduced = tmp_path / "m.safetensors", tmp_path / "reduced"
    invoked("calibrate", *named, "--images", home / "images.npy", "-o", moments, "--attention-system")
    method = ("--mlp", 0.5, "--attn", 0.5, "--preset", "corp", "--align", "head=8")
    assert "got" in invoked("reduce", *named, "--moments", moments, *method, "-o", reduced).stdout
    invoked("export", "--model", reduced, "-o", reduced / "model.onnx", "--precision", "fp32,fp16")
    proof = invoked(
        "verify", home / "dense", reduced, reduced / "model.onnx", reduced / "model.fp16.onnx",
        "--images", home / "images.npy", "-o", tmp_path / "parity.json", "--batch", "1,3", "--max-error", 9,
        "--json")  # fmt: skip
    record = json.loads(proof.stdout)
    assert [link["kind"] for link in record["links"]] == ["reduced", "exact", "half", "whole"]
    assert record["links"][1]["status"] == "PASS"
    assert record["links"][1]["tolerance"]["rule"] == "float32: 10 x 2^-24 x 14 products in a row"
    assert (tmp_path / "parity.npz").is_file()
    quick = ("--batch", "1,2", "--time-limit", 4, "--half-width", 0.9, "--min-rounds", 6, "--json")
    speed = invoked("bench", home / "dense", reduced / "model.onnx", *quick, "-o", tmp_path / "bench.json")
    assert [row["batch"] for row in json.loads(speed.stdout)["rows"]] == [1, 2]
    for suffix in (".html", ".md", ".csv", ".xml"):
        invoked("report", tmp_path, "-o", tmp_path / f"report{suffix}")
    assert "blocks.1.attn" in (tmp_path / "report.html").read_text()
    assert corp_deploy.load(reduced)(torch.from_numpy(tiny.images(2))).shape == (2, 7)


@pytest.mark.slow("graph", "measurement")
def test_batch_size_beyond_the_time_limit_is_reported_as_not_measured(tmp_path: Path) -> None:
    """The digits model takes about a millisecond an image, and an interval needs at least 28 times the batch."""
    graph, bench = tmp_path / "digits.onnx", tmp_path / "bench.json"
    invoked("export", "--model", ROOT / "examples" / "digits" / "model", "-o", graph)
    words = ("bench", graph, graph, "--batch", "1,1024", "--names", "one,same", "-o", bench, "--time-limit")
    done = invoked(*words, 1, "--half-width", 0.9, "--min-rounds", 6, "--block-ms", 1)
    rows = {row["batch"]: row for row in json.loads(bench.read_text())["rows"]}
    assert [rows[1]["trials"][name]["status"] for name in ("one", "same")] == ["ok", "ok"]
    assert {trial["status"] for trial in rows[1024]["trials"].values()} == {"out of time"}
    warning = next(line for line in done.stderr.splitlines() if line.startswith("warning: batch 1024, not measured: "))
    assert "--time-limit" in warning
    assert re.search(r"│ 1024 +│ out of ", done.stdout), done.stdout
    assert "inf" not in done.output
    invoked(*words, 0.001, code=3)
    assert {row["stop"] for row in json.loads(bench.read_text())["rows"]} == {"out of time"}


def test_unsuitable_moments_are_refused(home: Path, tmp_path: Path) -> None:
    whole = (home / "moments.safetensors").read_bytes()
    cut, foreign, absent = (tmp_path / f"{name}.safetensors" for name in ("cut", "foreign", "absent"))
    cut.write_bytes(whole[: len(whole) // 2])
    save_file({"x": torch.zeros(1)}, foreign)
    save(tiny.checkpoint(seed=3), tmp_path / "other")
    for path in (cut, foreign, absent):
        refused(reduce(home, tmp_path / "r", "--mlp", 0.5, moments=path), path.name)
    refused(reduce(home, tmp_path / "r", "--mlp", 0.5, model=tmp_path / "other"), "another model")
    refused(reduce(home, tmp_path / "r", "--attn", 0.5, "--preset", "corp", "--align", "head=8"), "--attention-system")
    assert not (tmp_path / "r").exists()


def test_unsuitable_graphs_and_reports_are_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(b"not a graph at all")
    proof = ["--images", home / "images.npy", "-o", tmp_path / "p.json"]
    refused(run("verify", home / "dense", tmp_path / "x.onnx", *proof), "x.onnx")
    refused(run("verify", home / "dense", home / "images.npy", *proof), "expected a directory written by corp-deploy")
    refused(run("bench", home / "dense", tmp_path / "x.onnx", "-o", tmp_path / "b.json"), "x.onnx")
    refused(run("report", tmp_path, "-o", tmp_path / "r.html"), "neither bench.json nor parity.json")
    refused(run("report", tmp_path, "-o", tmp_path / "r.pdf"), ".html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx"]


def test_internal_error_exits_with_70(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("corp_deploy.families.inspection.inspection_of_model", broken)
    refuses("bug in corp-deploy", "inspect", "--model", home / "dense", code=70)


# Help: commands in groups, the options that are used first, and all options with --help-all.

LONG = {name: command for name, command in main.commands.items() if isinstance(command, Command) and command.first}
MOMENTS = ROOT / "tests" / "golden" / "files" / "moments"


def shown(*words: str, code: int = 0) -> str:
    done = invoked(*words, code=code)
    assert max(map(len, done.stdout.splitlines()), default=0) <= 80
    return done.stdout


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


def options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def test_commands_are_listed_in_groups_with_full_sentences() -> None:
    text = shown("--help")
    rows = dict(re.findall(r"^  ([a-z][a-z-]+) {2,}(\S.*)$", text, re.MULTILINE))
    assert rows.keys() == {name for name in main.commands if " " not in name}
    assert all(said.endswith(".") and not said.endswith("..") for said in rows.values()), rows
    headings = re.findall(r"^([A-Z]\w+):$", text, re.MULTILINE)
    assert headings == ["Options", "Model", "Reduce", "Graph", "Proof", "Release", "Decoder", "Machine"]
    assert len(rows) <= 20


def test_every_command_is_listed_in_a_group_or_its_parents_help() -> None:
    assert [each.name for group in GROUPS.values() for each in group] == list(main.commands)
    below = [name for name in main.commands if " " in name]
    assert below
    for name in below:
        assert re.search(rf"^  {name}  ", shown(name.split()[0], "--help"), re.MULTILINE), name
        assert shown(*name.split(), "--help").startswith(f"Usage: main {name} ")


def test_short_help_lists_at_most_ten_options() -> None:
    assert {name for name, command in main.commands.items() if len(options(command)) > 12} == LONG.keys()
    assert {"reduce", "calibrate", "export", "verify", "bench", "sweep", "build"} <= LONG.keys()
    for name, command in LONG.items():
        text = shown(name, "--help")
        first = text.partition("\nOptions:\n")[2].partition("\nMore options (--help-all says what they do):\n")[0]
        rows = re.findall(r"^  (?:-\w, )?--([\w-]+)", first, re.MULTILINE)
        assert len(rows) <= 10 + len(("help", "help-all")), name
        assert rows[-2:] == ["help", "help-all"]
        assert {each.name for each in options(command) if each.required} <= set(command.first), name
        assert "Example: corp-deploy" in text
        assert options_in(text) >= {each.opts[0] for each in options(command)}, "the others are named"
        assert len(text.splitlines()) < 80, name


@pytest.mark.parametrize("name", main.commands)
def test_help_all_explains_every_option(name: str) -> None:
    command = main.commands[name]
    text = shown(*name.split(), "--help-all" if name in LONG else "--help")
    letters = "".join(text.split())  # a line may break after any dash
    rows = [line for line in text.splitlines() if re.match(r" {2}(-\w, )?--", line)]
    for option in options(command):
        assert any(option.opts[0] in options_in(row) for row in rows), option.opts
        assert "".join((option.help or "").split()) in letters, option.opts
    assert "".join((command.help or "").split()) in letters


def test_help_all_has_headings() -> None:
    headings = re.findall(r"^([A-Z][\w, ]+):$", shown("reduce", "--help-all"), re.MULTILINE)
    assert headings[0] == "General"
    assert {"Model", "Widths and method", "Budget", "Sparse weights", "Inputs", "Output"} <= set(headings)
    assert len(set(headings)) == len(headings)


def test_calibrate_accepts_merge_at_any_position(tmp_path: Path) -> None:
    parts = [str(MOMENTS / name) for name in ("vit.safetensors", "vit.held-out.safetensors")]
    for number, words in enumerate([["--merge", *parts], [*parts, "--merge"]]):
        invoked("calibrate", *words, "-o", tmp_path / f"{number}.safetensors")
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    invoked("calibrate", "--merge", parts[0], "-o", tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == Path(parts[0]).read_bytes()


def test_unknown_command_is_refused() -> None:
    refuses("No such option", "package", "lint", "--no-such")
    refuses("No such command 'lint'", "lint")


def test_empty_and_unknown_arguments_are_refused(home: Path, tmp_path: Path) -> None:
    refused(reduce(home, tmp_path / "r"), "nothing asked for: give --mlp, --attn or --conv")
    refused(reduce(home, tmp_path / "r", "--mlp", 0.5, "--align", "width=3"), "mlp= a whole number")
    refused(reduce(home, tmp_path / "r", "--mlp", 0.5, "--preset", "magic"), "magic")
    refused(reduce(home, tmp_path / "r", "--mlp", 0.5, "--ridge", 0), "--ridge")
    refused(run("export", "--model", home / "dense", "-o", tmp_path / "m.onnx", "--precision", "int8"), "int8")
    refused(run("bench", home / "dense", home / "dense", "--batch", "0,1", "-o", tmp_path / "b.json"), "--batch")
    assert list(tmp_path.iterdir()) == []
