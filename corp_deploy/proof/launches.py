"""Measurements in fresh processes of `bench`, one after the other, joined to one record."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from corp_deploy.invocation.option import Invocation
from corp_deploy.invocation.running import BenchOptions, FedOptions
from corp_deploy.spec.trusted_code import is_code_trusted
from ground.errors import EXIT_BAD_INPUT, EXIT_INCONCLUSIVE, BadInput, Missing
from perf.bench.launches import join_launches
from perf.record.runs import Bench, load_bench

from .engine_trust import are_engines_trusted

PROGRAM = (sys.executable, "-m", "corp_deploy")
LONGEST_END_S = 10.0  # a process that was asked to end is killed after this time
STEP_S = 1.0  # between two reports of progress
LAST_WORDS = 2000  # characters of a process that ended without a message


def time_launches(
    dense: Path,
    reduced: Path,
    options: BenchOptions,
    *,
    fed: FedOptions,
    command: Sequence[str] = (),
    progress: Callable[[float, str], None] | None = None,
) -> Bench:
    """Time both models in `options.launches` processes, or fewer if nothing can be timed within the time limit.

    Raises BadInput and Missing as the measurement in one process does.
    """
    own = BenchOptions.from_options({**options.values, "launches": 1})
    trust = {"trust_code": is_code_trusted(), "trust_engine": are_engines_trusted()}
    asked = {**own.command_options, **fed.command_options, **trust, "quiet": True}
    benches, expected_s = list[Bench](), own.time_limit * len(own.batches)

    def report(elapsed_s: float) -> None:
        if progress is not None:
            share = min(elapsed_s / expected_s, 1.0)
            progress((len(benches) + share) / options.launches, f"launch {len(benches) + 1}")

    with tempfile.TemporaryDirectory() as scratch:
        for launch in range(1, options.launches + 1):
            output = Path(scratch) / f"{launch}.json"
            command_line = Invocation(
                command="bench", arguments=(str(dense), str(reduced)), options=asked | {"output": output}
            )
            expected_s = _run(command_line.argv[1:], f"launch {launch}", report)
            benches.append(load_bench(output))
            if not benches[-1].is_timed:
                break
    return replace(join_launches(benches), command=tuple(command))


def _run(words: Sequence[str], name: str, report: Callable[[float], None]) -> float:
    """Run a command of corp-deploy to its end and return its seconds; end it early if this process is interrupted."""
    began_s = monotonic()
    started = subprocess.Popen(
        (*PROGRAM, *words),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        said = _wait(started, lambda: report(monotonic() - began_s))
    finally:
        _end(started)
    if started.returncode not in (0, EXIT_INCONCLUSIVE):
        message = said.rpartition("Error: ")[2].strip()[-LAST_WORDS:] or f"it ended with code {started.returncode}"
        raise (BadInput if started.returncode == EXIT_BAD_INPUT else Missing)(f"{name}: {message}")
    return monotonic() - began_s


def _wait(process: "subprocess.Popen[str]", report: Callable[[], None]) -> str:
    """Return what the process said on stderr."""
    while True:
        report()
        try:
            return process.communicate(timeout=STEP_S)[1]
        except subprocess.TimeoutExpired:
            continue


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=LONGEST_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
