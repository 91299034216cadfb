"""How many small faults, planted one at a time in the rooms where a wrong figure costs most, the tests find.

    python -m pytest -n 2 --cov --cov-context=test --junitxml build/junit.xml   # which test runs which line
    python -m benchmarks.suite.mutants --junit build/junit.xml --output build/mutants.json

Each mutant is a fork of this process in which the tests that run its line are run, quickest first, until one fails.
`--quick` takes the tests of `make test` alone. Constants of modules are not mutated, nor what only processes run.
"""

import importlib
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import click
import coverage
import pytest

from benchmarks.suite.mutations import ROOMS, ROOT, Mutant, mutants_of, plant_, sample
from ground.files import write_json

PARTS = {
    "algebra": ("corp_deploy/algebra", "calib/products.py", "calib/sums.py"),
    "graph": ("export/graph",),
    "gate": ("perf/gate", "perf/stats/decision.py"),
    "readers": ("ground", "perf/record", "corp_deploy/store", "calib/store.py", "corp_deploy/release/recipe.py"),
}
SECONDS = 30.0  # of tests for one mutant, as they took in the run that is read
PATIENCE = 6  # times as long may they take here
APART = "test_pretended_device"  # wants a process of its own
FOUND, SURVIVED, SLOW, UNTESTED = "found", "survived", "without end", "no test"
# What is imported before pytest begins can't be rewritten, and needn't be.
HOW = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
ENDED = {0: SURVIVED, 1: FOUND, 2: FOUND}


def files_of(part: str) -> Iterator[Path]:
    for name in PARTS[part]:
        path = ROOT / name
        yield from (path,) if path.is_file() else sorted(path.rglob("*.py"))


def seconds_of(junit: Path) -> dict[str, float]:
    """By a test's id."""
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in cases
    }


def tests_of_lines(data: Path, paths: Iterable[str]) -> dict[str, Mapping[int, set[str]]]:
    """Which tests ran each line of each file."""
    measured = coverage.CoverageData(str(data))
    measured.read()
    tests: dict[str, Mapping[int, set[str]]] = {}
    for path in paths:
        by_line: dict[int, set[str]] = defaultdict(set)
        for line, contexts in measured.contexts_by_lineno(str(ROOT / path)).items():
            by_line[line] = {context.rpartition("|")[0] for context in contexts if context}
        tests[path] = by_line
    return tests


def within(tests: Iterable[str], seconds: Mapping[str, float], limit_s: float = SECONDS) -> list[str]:
    """The quickest that fit together."""
    taken, left = list[str](), limit_s
    for test in sorted(tests, key=lambda each: (seconds[each], each)):
        left -= seconds[test] + 0.01
        if left < 0 and taken:
            break
        taken.append(test)
    return taken


def run_mutant(mutant: Mutant | None, tests: list[str], log: Path) -> NoReturn:
    """In a fork, which ends with pytest's exit status."""
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(into, 1)
    os.dup2(into, 2)
    os.setpgid(0, 0)
    code = 4
    try:
        if mutant is not None:
            plant_(mutant)
        code = int(pytest.main([*tests, *HOW]))
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def require_sound(tests: list[str], log: Path) -> None:
    """Without a fault every test passes in such a fork, or nothing would be shown by one that fails."""
    if (child := os.fork()) == 0:
        run_mutant(None, tests, log)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"tests fail without a fault ({code}), see {log}")


def outcomes(
    wanted: list[tuple[Mutant, list[str]]], logs: Path, seconds: Mapping[str, float]
) -> Iterator[tuple[Mutant, str]]:
    """Two at a time."""
    waiting, alive = list(wanted), dict[int, tuple[Mutant, float]]()
    while waiting or alive:
        while waiting and len(alive) < 2:
            mutant, tests = waiting.pop(0)
            if not tests:
                yield mutant, UNTESTED
                continue
            child = os.fork()
            if child == 0:
                run_mutant(mutant, tests, logs / f"{os.getpid()}.log")
            alive[child] = (mutant, time.monotonic() + 20 + PATIENCE * sum(seconds[test] for test in tests))
        for child, (mutant, deadline) in list(alive.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended and time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del alive[child]
                yield mutant, SLOW
            elif ended:
                del alive[child]
                code = os.waitstatus_to_exitcode(status)
                if code > 2:
                    sys.exit(f"{mutant}: pytest ended with {code}, see {logs / f'{child}.log'}")
                yield mutant, ENDED.get(code, FOUND)  # a signal ended it: found
                (logs / f"{child}.log").unlink(missing_ok=True)
        time.sleep(0.05)


def import_all() -> None:
    """So that every function exists before the first fork."""
    for room in ROOMS:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module.name.endswith(("__main__", "python_backend_model")):  # which runs inside a server alone
                importlib.import_module(module.name)


@click.command(help=__doc__)
@click.option("--data", type=click.Path(path_type=Path, exists=True), default=".coverage", help="What coverage wrote.")
@click.option(
    "--junit", type=click.Path(path_type=Path, exists=True), required=True, multiple=True, help="How long tests took."
)
@click.option("--quick", type=click.Path(path_type=Path, exists=True), help="Ids of the only tests to run, one a line.")
@click.option("--each", default=60, show_default=True, help="Mutants of each part.")
@click.option("--only", type=click.Choice(sorted(PARTS)), multiple=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(
    data: Path, junit: tuple[Path, ...], quick: Path | None, each: int, only: tuple[str, ...], output: Path
) -> None:
    seconds = {test: taken for path in junit for test, taken in seconds_of(path).items()}
    allowed = {test for test in seconds if APART not in test}
    if quick:
        allowed &= set(quick.read_text().split("\n"))
    logs = output.with_suffix(".logs")
    logs.mkdir(parents=True, exist_ok=True)
    import_all()
    found: dict[str, Any] = {}
    for part in only or PARTS:
        mutants = sample([mutant for path in files_of(part) for mutant in mutants_of(path)], each)
        ran = tests_of_lines(data, {mutant.path for mutant in mutants})
        wanted = [(m, within(ran[m.path][m.line] & allowed, seconds)) for m in mutants]
        require_sound(within({test for _, tests in wanted for test in tests}, seconds), logs / "sound.log")
        results = {}
        for mutant, outcome in outcomes(wanted, logs, seconds):
            results[mutant] = outcome
            click.echo(f"{outcome:12} {mutant.path}:{mutant.line} {mutant.function}: {mutant.fault}", err=True)
        left = [m for m in mutants if results[m] in (SURVIVED, UNTESTED)]
        found[part] = {
            "mutants": len(mutants),
            **dict(Counter(results.values())),
            "caught": sorted({f"{m.path}:{m.function}:{m.fault}" for m in mutants if m not in left}),
            "survivors": [f"{m.path}:{m.function}:{m.fault}:{results[m]}" for m in left],
        }
        write_json(output, found)


if __name__ == "__main__":
    main()
