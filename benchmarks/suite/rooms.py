"""What share of each room's lines the quick tests run, beside all tests.

    COVERAGE_FILE=build/quick python -m pytest -n 2 --dist loadfile -m "not slow" --cov --cov-report=
    COVERAGE_FILE=build/slow python -m pytest -n 2 --dist loadfile -m slow --cov --cov-report=
    python -m benchmarks.suite.rooms --quick build/quick --slow build/slow --output build/rooms.json

Lines that run while a room is imported count for both, those that only processes run for neither.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import coverage

from benchmarks.suite.mutations import ROOMS, ROOT
from ground.files import write_json


def room_of(path: Path) -> str:
    """corp_deploy is told by its own rooms."""
    first, second = path.parts[0], path.parts[1]
    return f"{first}/{second}" if first == "corp_deploy" and not second.endswith(".py") else first


def lines_of_rooms(quick: Path, slow: Path) -> dict[str, dict[str, int]]:
    """By room: lines that could run, those that all tests ran, and those that the quick ones did."""
    both = [coverage.Coverage(data_file=str(path)) for path in (quick, slow)]
    for each in both:
        each.load()
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"lines": 0, "whole": 0, "quick": 0})
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            lines = set(both[0].analysis2(str(path))[1])
            of_quick, of_slow = (lines & set(each.get_data().lines(str(path)) or ()) for each in both)
            entry = found[room_of(path.relative_to(ROOT))]
            entry["lines"] += len(lines)
            entry["whole"] += len(of_quick | of_slow)
            entry["quick"] += len(of_quick)
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
@click.option("--quick", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--slow", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(quick: Path, slow: Path, output: Path) -> None:
    write_json(output, shares(lines_of_rooms(quick, slow)))


if __name__ == "__main__":
    main()
