"""What share of each room's lines the quick tests run, beside all tests: one run, read twice.

    python -m pytest -n 2 --dist loadfile --cov=calib --cov=corp_deploy --cov=export --cov=ground --cov=perf \\
        --cov-context=test --cov-report= --junitxml build/junit.xml
    python -m pytest --collect-only -q -m "not slow" > build/quick.txt
    python -m benchmarks.suite.rooms --quick build/quick.txt --output build/rooms.json

Lines that run while a room is imported count for both, those that only processes run for neither. What a fixture of a
whole file runs counts for the test that came first, so a few lines of the quick run are missed.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import coverage

from benchmarks.suite.mutations import ROOT
from ground.files import write_json

ROOMS = ("calib", "corp_deploy", "export", "ground", "perf")


def room_of(path: Path) -> str:
    """corp_deploy is told by its own rooms."""
    first, second = path.parts[0], path.parts[1]
    return f"{first}/{second}" if first == "corp_deploy" and not second.endswith(".py") else first


def lines_of_rooms(data: Path, quick: frozenset[str]) -> dict[str, dict[str, int]]:
    """By room: lines that could run, those that all tests ran, and those that the quick ones did."""
    measured = coverage.Coverage(data_file=str(data))
    measured.load()
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"lines": 0, "whole": 0, "quick": 0})
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            lines = set(measured.analysis2(str(path))[1])
            contexts = measured.get_data().contexts_by_lineno(str(path))
            ran = {line: {context.rpartition("|")[0] for context in contexts[line]} for line in lines & set(contexts)}
            entry = found[room_of(path.relative_to(ROOT))]
            entry["lines"] += len(lines)
            entry["whole"] += len(ran)
            entry["quick"] += sum(bool(tests & quick or "" in tests) for tests in ran.values())
    return dict(found)


def shares(counted: dict[str, dict[str, int]]) -> dict[str, dict[str, Any]]:
    """In percent, each room and all together."""
    every = {key: sum(entry[key] for entry in counted.values()) for key in ("lines", "whole", "quick")}
    return {
        room: {"lines": entry["lines"]}
        | {key: round(100 * entry[key] / max(entry["lines"], 1), 1) for key in ("whole", "quick")}
        for room, entry in (*sorted(counted.items()), ("all", every))
    }


@click.command(help=__doc__)
@click.option("--data", type=click.Path(path_type=Path, exists=True), default=".coverage", help="What coverage wrote.")
@click.option("--quick", type=click.Path(path_type=Path, exists=True), required=True, help="Ids of the quick tests.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(data: Path, quick: Path, output: Path) -> None:
    write_json(output, shares(lines_of_rooms(data, frozenset(quick.read_text(encoding="utf-8").splitlines()))))


if __name__ == "__main__":
    main()
