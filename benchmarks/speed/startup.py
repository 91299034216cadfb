"""Start-up times of commands: their help and each on a small input, against importing torch and timm.

    python -m benchmarks.speed.startup --output benchmarks/results/startup.json

Every run is a fresh process. In a round all runs take turns, and every second round goes backwards. A ratio is the
median over rounds of the ratio within a round, so that other load affects both sides. With bytecode, every module was
compiled before. Without bytecode, an empty directory replaces all caches (PYTHONPYCACHEPREFIX) and no cache is written,
as in an image that is built without compiling. The inputs are of the digits example, made by the commands themselves,
and so small that starting takes most of the time.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from click.testing import CliRunner

from corp_deploy.cli import main as corp_deploy
from corp_deploy.demo.run import EXAMPLE
from corp_deploy.machine import versions
from ground.arrays import array_from_npz
from ground.files import write_json
from perf.timing.watch import environment
from tests.small_release import release_of

KIND, VERSION = "benchmarks/startup", 1
IMAGES = 32
BASELINES = {"import torch": "import torch", "import torch, timm": "import torch, timm"}
QUICK = ("--batch", "1", "--time-limit", "0.2", "--half-width", "0.9", "--min-rounds", "6", "--block-ms", "1")
INCONCLUSIVE = 3  # the exit code when a busy machine spoils the times
Clock = Literal["wall_s", "cpu_s"]
Samples = dict[str, list[float]]


def prepared(home: Path) -> dict[str, list[str]]:
    """Make inputs in this directory, and return the words of each command by its name in the record."""
    model, images, moments = EXAMPLE / "model", home / "images.npz", home / "moments.safetensors"
    dense, reduced, graph = home / "dense.onnx", home / "reduced", home / "reduced" / "model.onnx"
    bench, parity, release = home / "records" / "bench.json", home / "records" / "parity.json", home / "release"
    _call("demo", "--inputs-only", "-o", home / "start")
    drawn = array_from_npz(home / "start" / "images" / "calibration.npz", "images")[:IMAGES]
    np.savez(images, images=drawn)
    (home / "records").mkdir()
    words: dict[str, list[object]] = {
        "calibrate": ["calibrate", "--model", model, "--images", images, "-o", moments],
        "reduce": ["reduce", "--model", model, "--moments", moments, "--mlp", 0.5, "-o", reduced],
        "export": ["export", "--model", reduced, "-o", graph],
        "bench of two graphs": ["bench", dense, graph, *QUICK, "-o", bench],
        "verify of two graphs": [
            "verify", dense, dense, "--images", images, "--batch", 8, "--max-error", 1, "-o", parity,
        ],
        "inspect": ["inspect", "--model", model],
        "doctor": ["doctor"],
        "bench compare": ["bench", "compare", bench, bench],
        "gate": ["gate", bench, parity, "--fail-if", "speedup@b1 < 0.01"],
        "report": ["report", home / "records", "-o", home / "report.html"],
        "package lint": ["package", "lint", home / "repository"],
        "check": ["check", release],
    }  # fmt: skip
    _call("export", "--model", model, "-o", dense)
    for name in ("calibrate", "reduce", "export", "bench of two graphs", "verify of two graphs"):
        _call(*words[name])
    release_of(graph, drawn, release)
    _call("package", home, "-o", home / "repository")  # home has a reduced model
    return {name: [*map(str, each)] for name, each in words.items()}


def _call(*words: object) -> None:
    done = CliRunner().invoke(corp_deploy, [*map(str, words)])
    if done.exit_code not in (0, INCONCLUSIVE):
        raise click.ClickException(f"{words[0]} ended with {done.exit_code}: {done.output[-500:]}")


def helped() -> dict[str, list[str]]:
    """Return the words that show each command's help."""
    return {f"{name} --help": [*name.split(), "--help"] for name in sorted(corp_deploy.commands)}


def processes(home: Path) -> dict[str, list[str]]:
    """Return the command line of every run, baselines first."""
    tool = [sys.executable, "-m", "corp_deploy"]
    commands = {name: [*tool, *words] for name, words in (prepared(home) | helped()).items()}
    return {name: [sys.executable, "-c", code] for name, code in BASELINES.items()} | commands


def timed(command: Sequence[str], variables: Mapping[str, str]) -> dict[Clock, float]:
    """Return wall and CPU seconds of a process and its children. Raises ClickException if the process fails."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, INCONCLUSIVE):
            log.seek(0)
            said = log.read()[-500:].decode(errors="replace")
            raise click.ClickException(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def environments(threads: int, empty: Path) -> dict[bool, dict[str, str]]:
    """Return the environment variables of a run with compiled bytecode (True) and of one without."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own |= {"OMP_NUM_THREADS": str(threads)}
    return {True: own, False: {**own, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(empty)}}


def measured(
    commands: Mapping[str, Sequence[str]], variables: Mapping[bool, Mapping[str, str]], rounds: Mapping[bool, int]
) -> dict[bool, dict[str, Samples]]:
    """Time every run with bytecode and without, in the number of rounds of each kind."""
    samples: dict[bool, dict[str, Samples]] = {compiled: {} for compiled in variables}
    for number in range(max(rounds.values())):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            for compiled in (each for each in variables if number < rounds[each]):
                of_run = samples[compiled].setdefault(name, {"wall_s": [], "cpu_s": []})
                for clock, seconds in timed(commands[name], variables[compiled]).items():
                    of_run[clock].append(seconds)
    return samples


def rows_of(samples: Mapping[bool, Mapping[str, Samples]]) -> list[dict[str, Any]]:
    """Return a row for each run: medians, and the median over rounds of its ratio to each baseline of the same kind."""
    return [
        {
            "command": name,
            "bytecode": compiled,
            **{clock: statistics.median(seconds) for clock, seconds in of_run.items()},
            "ratio": {
                baseline: {clock: _ratio(of_run[clock], of_kind[baseline][clock]) for clock in of_run}
                for baseline in BASELINES
            },
            "samples": of_run,
        }
        for compiled, of_kind in samples.items()
        for name, of_run in of_kind.items()
    ]


def _ratio(seconds: Sequence[float], of: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(seconds, of, strict=True))


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="With compiled bytecode.")
@click.option("--rounds-without", type=click.IntRange(1), default=3, show_default=True, help="Without bytecode.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
def main(output: Path, rounds: int, rounds_without: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, empty = Path(folder) / "home", Path(folder) / "empty"
        home.mkdir()
        empty.mkdir()
        commands, variables = processes(home), environments(threads, empty)
        for command in commands.values():
            timed(command, variables[True])  # compiles what is imported
        rows = rows_of(measured(commands, variables, {True: rounds, False: rounds_without}))
    record = {
        "kind": KIND,
        "version": VERSION,
        "environment": environment(),
        "versions": versions(),
        "threads": threads,
        "images": IMAGES,
        "rounds": {"with": rounds, "without": rounds_without},
        "rows": rows,
    }
    write_json(output, record, indent=1)
    for row in rows:
        kind = "" if row["bytecode"] else ", without bytecode"
        of_torch = row["ratio"]["import torch"]["cpu_s"]
        click.echo(f"{row['command']}{kind}: {row['cpu_s']:.2f} CPU s, {of_torch:.2f} times import torch")


if __name__ == "__main__":
    main()
