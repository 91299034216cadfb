"""benchmarks/results/suite.json: how long the tests take, what the quick ones run, and which planted faults are found.

    python -m benchmarks.suite.record --quick build/quick.xml --slow build/slow.xml --lint-s 40 \\
        --make build/make.json --rooms build/rooms.json --mutants build/mutants.json --mutants-before build/before.json

The files are what pytest, `benchmarks.suite.rooms` and `benchmarks.suite.mutants` write; `--make` has the seconds on
the clock and of the CPU of each command in a fresh clone: {"make demo": {"wall_s", "cpu_s"}, "make test", ".ci/run"}.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click

from benchmarks.release.installs import outcome
from benchmarks.suite.mutations import ROOT
from corp_deploy.machine import versions
from ground.files import write_json

RECORD = ROOT / "benchmarks" / "results" / "suite.json"
MOST_BELOW = 8.0  # points of a room's lines that the quick tests may leave out of what all run
A_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def run_of(junit: Path) -> dict[str, Any]:
    """How a run of pytest ended, and its seconds."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    return {"seconds": round(float(suite.get("time", 0)), 1), **outcome(junit)}


@click.command(help=__doc__)
@click.option("--quick", type=A_FILE, required=True)
@click.option("--slow", type=A_FILE, required=True)
@click.option("--lint-s", type=float, required=True)
@click.option("--rooms", type=A_FILE, required=True)
@click.option("--make", type=A_FILE, required=True)
@click.option("--mutants", type=A_FILE, required=True)
@click.option("--mutants-before", type=A_FILE, required=True, help="Before the last change of tiers.")
@click.option("--output", type=click.Path(path_type=Path), default=RECORD)
def main(
    quick: Path, slow: Path, lint_s: float, rooms: Path, make: Path, mutants: Path, mutants_before: Path, output: Path
) -> None:
    """Write the record."""
    content = {
        "kind": "corp-deploy/suite",
        "version": 2,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "make": json.loads(make.read_text(encoding="utf-8")),
        "lint_s": lint_s,
        "quick": run_of(quick),
        "slow": run_of(slow),
        "rooms": json.loads(rooms.read_text(encoding="utf-8")),
        "mutants": json.loads(mutants.read_text(encoding="utf-8")),
        "mutants_before": json.loads(mutants_before.read_text(encoding="utf-8")),
    }
    write_json(output, content)


if __name__ == "__main__":
    main()
