"""Calls that can't go well, made from ones that do: one option, argument or file of each is spoilt, by its type.

Each ends with exit code 2 (4 where this machine lacks what is asked for), one message, no traceback, in a minute, and
leaves every file as it was, the output of an earlier call among them.

    python -m benchmarks.trust.bad_calls --output benchmarks/results/bad_calls.json
"""

import argparse
import io
import json
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
from hashlib import sha256
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from benchmarks.trust.spoilt_calls import Call, bad_calls, good_calls, made_calls_home
from corp_deploy.cli import main as corp_deploy
from corp_deploy.machine import versions
from ground.files import write_json

LONGEST_S = 60
LONGEST_MESSAGE = 4000


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
    "package serve": "it takes a server",
    "build": "half a minute",
    "ship": "a minute",
}
"""Calls that are taken to go well."""


def require_good(home: Path) -> None:
    """What is spoilt must be good: refused for another reason, a call would prove nothing."""
    for name, words in good_calls(home).items():
        if name in UNTRIED:
            continue
        result = CliRunner().invoke(corp_deploy, [*name.partition(":")[0].split(), *words])
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
        result = CliRunner().invoke(corp_deploy, [*call.command.partition(":")[0].split(), *call.words])
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
