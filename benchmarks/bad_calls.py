"""Calls that can't go well, made from ones that do: one option, argument or file of each is spoilt, by its type.

Each ends with exit code 2 (4 where this machine lacks what is asked for), one message, no traceback, in a minute, and
leaves every file as it was, the output of an earlier call among them.

    python -m benchmarks.bad_calls --output benchmarks/results/bad_calls.json
"""

import argparse
import io
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.testing import CliRunner, Result

from benchmarks.fuzz.readers import made_home
from corp_deploy.cli import main as corp_deploy
from corp_deploy.commands.options import RegularPath
from corp_deploy.machine import versions
from ground.files import write_json

LONGEST_S = 60
LONGEST_MESSAGE = 4000
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
    pair, out = [f"{home}/model.onnx", f"{home}/reduced.onnx"], f"{home}/out"
    return {
        "audit": [*pair, "--output", f"{out}/audit.json"],
        "bench": [*pair, "--output", f"{out}/bench.json", "--batch", "1", "--time-limit", "1"],
        "build": [pair[0], "--output", f"{out}/m.plan", "--backend", "tensorrt-rtx", "--sm", "86", "--batch", "1:2:4"],
        "calibrate": [*model, *images, "--output", f"{out}/m.safetensors"],
        "check": [f"{home}/released"],
        "compare": [f"{home}/run/bench.json", f"{home}/run/bench.json"],
        "completion": ["bash"],
        "demo": ["--output", f"{out}/demo"],
        "doctor": [],
        "export": [*model, "--output", f"{out}/m.onnx"],
        "gate": [f"{home}/run/bench.json", "--fail-if", "p50@b1 > 1e9", "--output", f"{out}/gate.json"],
        "inspect": model,
        "latency-table": [*model, "--output", f"{out}/table", "--batch", "1", "--align", "mlp=24,head=6"],
        "lint-repo": [f"{home}/repository"],
        "merge-moments": [moments[1], others, "--output", f"{out}/both.safetensors"],
        "package": [f"{home}/packed", "--output", f"{out}/repository"],
        "reduce": [*model, *moments, "--output", f"{out}/reduced", "--mlp", "0.5"],
        "redundancy": [*moments, "--output", f"{out}/redundancy.json"],
        "release": [f"{home}/recipe.toml", "--output", f"{out}/release", "--dry-run"],
        "report": [f"{home}/run", "--output", f"{out}/report.html"],
        "serve-version": [f"{home}/repository", "--name", "vit", "--model-version", "1", "--server", "http://127.0.0.1:9"],
        "sweep": [*model, *moments, *images, "--output", f"{out}/sweep", "--sparsity", "0.5"],
        "verify": [f"{home}/model", f"{home}/reduced", *images, "--output", f"{out}/parity.json"],
    }  # fmt: skip


def made_calls_home(home: Path) -> None:
    """Beside what readers need: a reduced model, its graph, records, something to package, other images' moments."""
    made_home(home)
    good = good_calls(home)
    np.save(home / "others.npy", -np.load(home / "images.npy"))
    steps = [
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
    kind = type(parameter.type).__name__
    if (command, parameter.opts[0]) in FREE:
        return
    for value in {"Number": NUMBERS, "Numbers": LISTS, "JsonObject": OBJECTS}.get(kind, WORDS):
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
        command = corp_deploy.get_command(context, name)
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


def tree(folder: Path) -> dict[str, str]:
    """Every file's digest; other things by their kind."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        found[str(path.relative_to(folder))] = (
            sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else f"kind {stat.S_IFMT(mode)}"
        )
    return found


@contextmanager
def in_time() -> Iterator[None]:
    """What waits without end is interrupted."""

    def too_long(*_: object) -> None:
        raise TimeoutError("this was to be refused at once")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


UNTRIED = {
    "demo": "minutes",
    "check": "it takes a release",
    "serve-version": "it takes a server",
    "build": "half a minute",
}
"""Calls that are taken to go well."""


def require_good(home: Path) -> None:
    """What is spoilt must be good: refused for another reason, a call would prove nothing."""
    for name, words in good_calls(home).items():
        if name in UNTRIED:
            continue
        result = CliRunner().invoke(corp_deploy, [name, *words])
        if result.exit_code not in (0, 1, 3, 4):
            raise RuntimeError(f"{name}: {result.output}")
    shutil.rmtree(home / "out")
    (home / "out").mkdir()


def faults_of(result: Result, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What a call that can't go well did wrong."""
    found = []
    if result.exit_code not in (2, 4):
        found.append(f"exit code {result.exit_code}")
    if "Traceback" in result.output or not isinstance(result.exception, SystemExit | None):
        found.append("traceback")
    if "Error: " not in result.stderr or len(result.stderr) > LONGEST_MESSAGE:
        found.append(f"a message of {len(result.stderr)} letters")
    if lost := sorted(name for name in before if after.get(name) != before[name]):
        found.append(f"changed {lost[0]}")
    if new := sorted(after.keys() - before.keys()):
        found.append(f"left {new[0]}")
    return found


def judged(call: Call, home: Path) -> dict[str, Any]:
    """The call made, in this process, and what it did wrong."""
    before, begun = tree(home), time.perf_counter()
    with in_time():
        result = CliRunner().invoke(corp_deploy, [call.command, *call.words])
    seconds = time.perf_counter() - begun
    faults = faults_of(result, before, tree(home))
    told = {"command": call.command, "wrong": call.wrong, "exit_code": result.exit_code, "seconds": round(seconds, 2)}
    if faults:
        told |= {"faults": faults, "said": result.stderr[-300:], "words": [word[:80] for word in call.words]}
        if result.exc_info and not isinstance(result.exception, SystemExit):
            file = io.StringIO()
            traceback.print_exception(*result.exc_info, limit=-2, file=file)
            told["said"] = file.getvalue()[-500:]
    return told


def _tally(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    codes = Counter(str(one["exit_code"]) for one in own)
    slowest = max((one["seconds"] for one in own), default=None)
    return {"calls": len(own), "exit_codes": dict(sorted(codes.items())), "slowest_s": slowest}


def document(done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record."""
    by_command = {
        name: {
            "calls": sum(one["command"] == name for one in done),
            "exit_codes": dict(
                sorted(Counter(str(one["exit_code"]) for one in done if one["command"] == name).items())
            ),
            "slowest_s": max(one["seconds"] for one in done if one["command"] == name),
        }
        for name in sorted({one["command"] for one in done})
    }
    faulty = [one for one in done if "faults" in one]
    return {"kind": "bad-calls", "version": 1, "versions": versions(), "calls": len(done), "faults": len(faulty),
            "by_command": by_command, "faulty": faulty}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=None, help="One command.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        made_calls_home(home)
        (home / "out").mkdir()
        require_good(home)
        calls = [call for call in bad_calls(home) if arguments.only in (None, call.command)]
        done = []
        for number, call in enumerate(calls, start=1):
            done.append(judged(call, home))
            if "faults" in done[-1]:
                print(json.dumps(done[-1]), file=sys.stderr, flush=True)
            if number % 100 == 0:
                print(f"{number} of {len(calls)}", flush=True)
        write_json(arguments.output, document(done), indent=1)
    print(json.dumps(document(done)["by_command"]))


if __name__ == "__main__":
    main()
