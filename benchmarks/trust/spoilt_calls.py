"""Calls that go well, of every command, and what spoils them: one option, argument or file, by its type."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from click.testing import CliRunner

from benchmarks.trust.fuzz.readers import made_home
from corp_deploy.cli import main as corp_deploy
from corp_deploy.commands.options import RegularPath, Value
from corp_deploy.invocation.source import JSON
from tests import decoders

NUMBERS = ("nan", "inf", "-inf", "1e400", "1_0", "٣", "=1", "", "x", "0x10", "9" * 30, "1 2")
LISTS = ("", ",", "1,,2", "1,nan", "1,٣", "x", "9" * 30, "1;2")
WORDS = ("", "nonsense", "\x1b[31mred", "../../nonsense", "n" * 10_000, "[/bold]", "a=b=c", "nan")
OBJECTS = (
    "",
    "x",
    "[1]",
    '{"depth": 10000000}',
    '{"embed_dim": 0}',
    '{"a":' * 3000,
    '{"no_such": 1}',
    '{"img_size": "x"}',
)
OUTPUTS = ("output", "summary", "track", "write_golden", "polygraphy", "timing_cache", "history")
SPOILT = {
    "empty": b"",
    "junk": bytes(range(256)) * 4,
    "deep.json": b"[" * 20_000,
    "other.json": b'{"kind": "nonsense", "version": 99}',
    "cut.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999, 3), }",
    "open.toml": b"[model\nmodel = ",
}
FREE = {("package", "--name"), ("report", "--title"), ("release", "--init"), ("release", "--only")}
"""Options that any word will do for, or that have a test of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, and what is wrong with it."""

    command: str
    words: tuple[str, ...]
    wrong: str


def good_calls(home: Path) -> dict[str, list[str]]:
    """By command: words that go well, or that would on a machine that has what they need."""
    model = ["--model", f"{home}/model"]
    images, moments = ["--images", f"{home}/images.npy"], ["--moments", f"{home}/moments.safetensors"]
    others = f"{home}/others.safetensors"
    graphs = [f"{home}/decoder-onnx", f"{home}/decoder-onnx"]
    quick = ["--batch", "1", "--time-limit", "1"]
    pair, out = [f"{home}/model.onnx", f"{home}/reduced.onnx"], f"{home}/out"
    return {
        "audit": [*pair, "--output", f"{out}/audit.json"],
        "bench": [*pair, "--output", f"{out}/bench.json", *quick],
        "bench: decoders": [*graphs, "--output", f"{out}/decoders.json", "--length", "8", "--cached", "8", *quick],
        "build": [pair[0], "--output", f"{out}/m.plan", "--backend", "tensorrt-rtx", "--sm", "86", "--batch", "1:2:4"],
        "calibrate": [*model, *images, "--output", f"{out}/m.safetensors"],
        "check": [f"{home}/released"],
        "bench compare": [f"{home}/run/bench.json", f"{home}/run/bench.json"],
        "doctor completion": ["bash"],
        "demo": ["--output", f"{out}/demo"],
        "doctor": [],
        "export-decoder": [f"{home}/decoder", "--output", f"{out}/decoder"],
        "export": [*model, "--output", f"{out}/m.onnx"],
        "gate": [f"{home}/run/bench.json", "--fail-if", "p50@b1 > 1e9", "--output", f"{out}/gate.json"],
        "inspect": model,
        "latency-table": [*model, "--output", f"{out}/table", "--batch", "1", "--align", "mlp=24,head=6"],
        "package lint": [f"{home}/repository"],
        "calibrate --merge": [moments[1], others, "--output", f"{out}/both.safetensors"],
        "package": [f"{home}/packed", "--output", f"{out}/repository"],
        "reduce": [*model, *moments, "--output", f"{out}/reduced", "--mlp", "0.5"],
        "perplexity": [f"{home}/model", f"{home}/reduced", "--text", f"{home}/text.txt", "--output", f"{out}/p.json"],
        "inspect redundancy": [*moments, "--output", f"{out}/redundancy.json"],
        "release": [f"{home}/recipe.toml", "--output", f"{out}/release", "--dry-run"],
        "ship": [f"{home}/model", *images, "--output", f"{out}/shipped"],
        "report": [f"{home}/run", "--output", f"{out}/report.html"],
        "package serve": [f"{home}/repository", "--name", "vit", "--model-version", "1", "--server", "http://127.0.0.1:9"],
        "sweep": [*model, *moments, *images, "--output", f"{out}/sweep", "--sparsity", "0.5"],
        "verify: a decoder": [f"{home}/decoder", graphs[0], "--random", "2", "--output", f"{out}/decoder.json"],
        "verify": [f"{home}/model", f"{home}/reduced", *images, "--output", f"{out}/parity.json"],
    }  # fmt: skip


def made_calls_home(home: Path) -> None:
    """Beside what readers need: a reduced model, its graph, records, something to package, other images' moments."""
    made_home(home)
    good = good_calls(home)
    decoders.write_decoder(home / "decoder", "llama")
    np.save(home / "others.npy", -np.load(home / "images.npy"))
    steps = [
        ["export-decoder", f"{home}/decoder", "-o", f"{home}/decoder-onnx"],
        ["calibrate", *good["calibrate"][:2], "--images", f"{home}/others.npy", "-o", f"{home}/others.safetensors"],
        ["reduce", *good["reduce"][:4], "--mlp", "0.5", "-o", f"{home}/reduced"],
        ["export", "--model", f"{home}/reduced", "-o", f"{home}/reduced.onnx"],
        ["bench", *good["bench"][:2], "-o", f"{home}/run/bench.json", "--batch", "1", "--time-limit", "1"],
        ["verify", *good["verify"][:4], "-o", f"{home}/run/parity.json"],
        ["export", "--model", f"{home}/reduced", "-o", f"{home}/packed/reduced/model.onnx"],
    ]  # fmt: skip
    for words in steps:
        done = CliRunner().invoke(corp_deploy, words)
        if done.exit_code not in (0, 3):
            raise RuntimeError(done.output)
    (home / "recipe.toml").write_text('[model]\nmodel = "model"\n[calibration]\nimages = "images.npy"\n'
                                      '[held_out]\nimages = "others.npy"\n[reduce]\nmlp = 0.5\n')  # fmt: skip
    made_spoilt(home)


def made_spoilt(home: Path) -> None:
    """Files that nothing takes."""
    spoilt = home / "spoilt"
    spoilt.mkdir()
    for name, content in SPOILT.items():
        (spoilt / name).write_bytes(content)
    os.mkfifo(spoilt / "pipe")
    (spoilt / "device").symlink_to("/dev/zero")
    (spoilt / "folder").mkdir()
    (spoilt / "folder" / "file").write_bytes(b"finished work")


def _values(command: str, parameter: click.Parameter, home: Path) -> Iterator[tuple[str, str]]:
    """Values that this one can't take, each with its name."""
    if isinstance(parameter.type, RegularPath):
        yield from _paths(parameter, home)
        return
    known = parameter.type.values if isinstance(parameter.type, Value) else parameter.type
    kind = type(known).__name__
    if (command, parameter.opts[0]) in FREE:
        return
    objects = {"ParsedText": OBJECTS} if known is JSON else {}
    for value in ({"Count": NUMBERS, "Real": NUMBERS, "ListOf": LISTS} | objects).get(kind, WORDS):
        yield value, f"{value[:30]!r}"
    if kind == "Paths" or parameter.name in ("model", "candidates"):
        yield from _paths(parameter, home)


def _paths(parameter: click.Parameter, home: Path) -> Iterator[tuple[str, str]]:
    spoilt = home / "spoilt"
    yield str(spoilt / "pipe"), "a pipe"
    yield str(spoilt / "device"), "a device"
    yield str(spoilt / "junk" / "below"), "a path below a file"
    if parameter.name in OUTPUTS:
        return
    yield str(home / "missing"), "nothing there"
    for name in SPOILT:
        yield str(spoilt / name), name
    yield str(spoilt / "folder"), "a foreign folder"


def _without(words: Sequence[str], name: str) -> list[str]:
    place = words.index(name)
    return [*words[:place], *words[place + 2 :]]


def bad_calls(home: Path) -> Iterator[Call]:
    """For every parameter of every command."""
    context = click.Context(corp_deploy)
    for name, good in good_calls(home).items():
        command = corp_deploy.get_command(context, name.partition(":")[0])
        assert command is not None, name
        yield Call(command=name, words=(*good, "--no-such-option"), wrong="an option that is none")
        positions = 0
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                rest = good[positions + 1 :]
                for value, wrong in _values(name, parameter, home):
                    yield Call(
                        command=name, words=(*good[:positions], value, *rest), wrong=f"{parameter.name}: {wrong}"
                    )
                positions += 1
                continue
            option = parameter.opts[0]
            long = next(word for word in parameter.opts if word.startswith("--"))
            if parameter.required and long in good:
                yield Call(command=name, words=tuple(_without(good, long)), wrong=f"no {long}")
            if getattr(parameter, "is_flag", False):
                yield Call(command=name, words=(*good, f"{long}=x"), wrong=f"{long}: a value")
                continue
            base = _without(good, long) if long in good else good
            for value, wrong in _values(name, parameter, home):
                yield Call(command=name, words=(*base, f"{option}={value}"), wrong=f"{option}: {wrong}")
