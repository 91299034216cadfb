"""One value of a valid call is spoilt, by the type of its option: exit code 2, one message, and no file changes."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from corp_deploy.cli import main
from corp_deploy.commands.options import RegularPath, Value
from corp_deploy.invocation.source import JSON
from tests.command import refused, run

NUMBERS = ("nan", "inf", "-inf", "1e400", "1_0", "٣", "=1", "", "x", "0x10", "9" * 30, "1 2")
LISTS = ("", ",", "1,,2", "1,nan", "1,٣", "x", "9" * 30, "1;2")
WORDS = ("", "nonsense", "\x1b[31mred", "../../nonsense", "n" * 10_000, "[/bold]", "a=b=c", "nan")
OBJECTS = ("", "x", "[1]", '{"depth": 10000000}', '{"embed_dim": 0}', '{"a":' * 3000, '{"no_such": 1}')
SPOILT = {
    "empty": b"",
    "junk": bytes(range(256)) * 4,
    "deep.json": b"[" * 20_000,
    "other.json": b'{"kind": "nonsense", "version": 99}',
    "cut.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999, 3), }",
    "open.toml": b"[model\nmodel = ",
}
OUTPUTS = ("output", "summary", "track", "write_golden", "polygraphy", "timing_cache", "history", "metrics")
FREE = {("package", "--name"), ("report", "--title"), ("release", "--init"), ("release", "--only")}
"""Options that take any word, or that have tests of their own."""
MODEL, IMAGES, MOMENTS = "--model model", "--images images.npy", "--moments moments.safetensors"
VALID = {
    "audit": "model.onnx reduced.onnx -o audit.json",
    "bench": "model.onnx reduced.onnx -o bench.json --batch 1",
    "bench compare": "bench.json bench.json",
    "build": "model.onnx -o m.plan --backend tensorrt-rtx --sm 86 --batch 1:2:4",
    "calibrate": f"{MODEL} {IMAGES} -o m.safetensors",
    "calibrate --merge": "moments.safetensors others.safetensors -o both.safetensors",
    "check": "released",
    "doctor": "",
    "doctor completion": "bash",
    "demo": "-o demo",
    "export": f"{MODEL} -o m.onnx",
    "export-decoder": "decoder -o onnx",
    "gate": "bench.json -o gate.json",
    "inspect": MODEL,
    "inspect redundancy": f"{MOMENTS} -o redundancy.json",
    "latency-table": f"{MODEL} -o table --batch 1 --align mlp=24,head=6",
    "package": "packed -o repository",
    "package lint": "repository",
    "package serve": "repository --name vit --model-version 1 --server http://127.0.0.1:9",
    "perplexity": "model reduced --text text.txt -o p.json",
    "reduce": f"{MODEL} {MOMENTS} -o reduced --mlp 0.5",
    "release": "recipe.toml -o release --dry-run",
    "report": "run -o report.html",
    "ship": f"model {IMAGES} -o shipped",
    "sweep": f"{MODEL} {MOMENTS} {IMAGES} -o sweep --sparsity 0.5",
    "verify": f"model reduced {IMAGES} -o parity.json",
}
"""The words of a call of every command; what is spoilt is refused before the files are looked at, or is one of them."""


def spoilt_values(command: str, parameter: click.Parameter) -> Iterator[str]:
    """Yield values that the parameter can't take."""
    if (command, parameter.opts[0]) in FREE:
        return
    is_path = isinstance(parameter.type, RegularPath)
    if not is_path:
        known = parameter.type.values if isinstance(parameter.type, Value) else parameter.type
        objects = {"ParsedText": OBJECTS} if known is JSON else {}
        yield from ({"Count": NUMBERS, "Real": NUMBERS, "ListOf": LISTS} | objects).get(type(known).__name__, WORDS)
    if is_path or type(parameter.type).__name__ == "Paths" or parameter.name in ("model", "candidates"):
        yield from ("spoilt/pipe", "spoilt/device", "spoilt/junk/below")
        if parameter.name not in OUTPUTS:
            yield from ("missing", "spoilt/folder", *(f"spoilt/{name}" for name in SPOILT))


def without(words: list[str], *names: str) -> list[str]:
    place = next((place for place, word in enumerate(words) if word in names), len(words))
    return words[:place] + words[place + 2 :]


def spoilt_calls(command: str) -> Iterator[list[str]]:
    """Yield calls of a command with one argument, option or value that can't be."""
    valid, positions = VALID[command].split(), 0
    yield [*valid, "--no-such-option"]
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Argument):
            for value in spoilt_values(command, parameter):
                yield [*valid[:positions], value, *valid[positions + 1 :]]
            positions += 1
            continue
        rest = without(valid, *parameter.opts)
        if parameter.required:
            yield rest
        if getattr(parameter, "is_flag", False):
            yield [*valid, f"{parameter.opts[-1]}=x"]
        else:
            yield from ([*rest, f"{parameter.opts[-1]}={value}"] for value in spoilt_values(command, parameter))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calls")
    (root / "spoilt" / "folder").mkdir(parents=True)
    (root / "spoilt" / "folder" / "file").write_bytes(b"finished work")
    for name, content in SPOILT.items():
        (root / "spoilt" / name).write_bytes(content)
    os.mkfifo(root / "spoilt" / "pipe")
    (root / "spoilt" / "device").symlink_to("/dev/zero")
    return root


def contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in home.rglob("*")}


@pytest.mark.parametrize("command", sorted(main.commands))
def test_corrupted_call_is_refused_and_changes_nothing(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every eleventh one of each command."""
    monkeypatch.chdir(home)
    before = contents(home)
    for words in list(spoilt_calls(command))[::11]:
        done = run(*command.split(), *words)
        refused(done, code=done.exit_code if done.exit_code == 4 else 2)
        assert contents(home) == before, (command, words)
