"""What is left where a command is disturbed: its files fail one after the other, the disk is full, it gets signals, it
runs twice at once, memory runs out, a worker dies, the clock leaps.

python -m benchmarks.trust.faults --home DIR          results/faults.json, row by row: goes on where it stopped
python -m benchmarks.trust.faults --home DIR --quick  some points of one command, told as JSON
python -m benchmarks.trust.faults_page                docs/security/faults.md of the record
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.trust import faults_happenings, faults_pairs, faults_scenarios
from benchmarks.trust.faults_happening import Happening
from benchmarks.trust.faults_rows import Row, Scenario, Undisturbed, row, some
from benchmarks.trust.faults_scenarios import prepare
from ground.files import write_json
from tests.faults import Fault, library

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "faults.json"
MARK = "CORP_DEPLOY_FAULTS"
FULL, FULL_EVER, KILLED = (
    Fault(name="the disk is full, once"),
    Fault(name="the disk is full, from then on", ever=True),
    Fault(name="SIGKILL", signal=signal.SIGKILL),
)
AT_EVERY_POINT = (FULL, FULL_EVER, KILLED)
AT_SOME = (
    Fault(name="the disk fails, once", number=errno.EIO),
    Fault(name="read-only, from then on", number=errno.EROFS, ever=True),
    Fault(name="SIGINT", signal=signal.SIGINT),
    Fault(name="SIGTERM", signal=signal.SIGTERM),
)
AT_ANY_TIME = tuple(replace(each, name=f"{each.name}, at any time") for each in (*AT_SOME[2:], KILLED))
SOME, TIMES = 6, 3
PARTS: Mapping[str, Callable[[Path], Iterator[Scenario]]] = {
    "reduce": faults_scenarios.scenarios_of_reduce,
    "package": faults_scenarios.scenarios_of_package,
    "calibrate": faults_scenarios.scenarios_of_calibrate,
    "release": faults_scenarios.scenarios_of_release,
    "others": faults_scenarios.scenarios_of_others,
}


class Record:
    """Rows by command, start and fault, and what else happened; written whole after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, list[dict[str, Any]]] = {"rows": [], "happenings": []}
        if path.exists():
            self.held = json.loads(path.read_text())

    def has(self, kind: str, **key: str) -> bool:
        return any(key.items() <= each.items() for each in self.held[kind])

    def add(self, kind: str, entry: Row | Happening) -> None:
        fields = asdict(entry)
        self.held[kind].append(fields)
        write_json(self.path, self.held)
        said = f"{fields['command']}: {fields.get('fault') or fields.get('what')}"
        click.echo("\n  ".join([said, *(str(each) for each in fields["wrong"])]), err=True)


def planned(command: str, part: str) -> Iterator[tuple[Fault, int | None, Sequence[float]]]:
    """The faults of a command: each at every point, at so many that are drawn, or after shares of its time."""
    every = () if part == "others" else AT_EVERY_POINT if part != "release" else AT_EVERY_POINT[:2]
    for fault in (*AT_EVERY_POINT, *AT_SOME):
        yield fault, None if fault in every else SOME, ()
    draw = random.Random(command)
    for fault in AT_ANY_TIME:
        yield fault, None, [round(draw.uniform(0.02, 0.98), 3) for _ in range(TIMES)]


def disturb(home: Path, part: str, record: Record) -> None:
    """One part of the table, without rows that are recorded."""
    prepare(home)
    for scenario in PARTS[part](home):
        held: Undisturbed | None = None
        for fault, most, shares in planned(scenario.command, part):
            if record.has("rows", command=scenario.command, start=scenario.start, fault=fault.name):
                continue
            held = held or Undisturbed.of(scenario)
            if held.operations or shares:
                points = None if most is None else some(held.operations, most)
                record.add("rows", row(held, fault, points, shares))


def happen(home: Path, record: Record) -> None:
    """What happens to whole commands, without what is recorded."""
    prepare(home)
    for each in (*faults_pairs.EVERY, *faults_happenings.EVERY):
        if not record.has("happenings", made_by=each.__name__):
            record.add("happenings", each(home))


def quick_rows(home: Path) -> list[Row]:
    """Some points of one command."""
    prepare(home)
    *_, model = faults_scenarios.scenarios_of_reduce(home)
    held = Undisturbed.of(model)
    return [row(held, FULL, (17,)), row(held, FULL_EVER, (27,)), row(held, KILLED, (28,))]


def behind_library(home: Path) -> None:
    """Start this program again with the library before the C library's, where it isn't."""
    if MARK not in os.environ:
        shim = library(home)
        environment = {**os.environ, "LD_PRELOAD": str(shim), MARK: str(home), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "benchmarks.trust.faults", *sys.argv[1:]]
        sys.exit(subprocess.run(words, env=environment, check=False).returncode)


@click.command()
@click.option("--quick", is_flag=True, help="Some points alone, told as JSON.")
@click.option("--only", type=click.Choice([*PARTS, "happenings"]), multiple=True, help="Parts of the table.")
@click.option("--output", type=click.Path(path_type=Path), default=RECORD, help="The record.")
@click.option("--home", type=click.Path(path_type=Path), required=True, help="A directory to work in.")
def main(quick: bool, only: tuple[str, ...], output: Path, home: Path) -> None:
    """Disturb commands and record what is left."""
    home.mkdir(parents=True, exist_ok=True)
    behind_library(home)
    if quick:
        click.echo(json.dumps([asdict(each) for each in quick_rows(home / "quick")]))
        return
    record = Record(output)
    for part in only or (*PARTS, "happenings"):
        folder = home / f"{part} {os.getpid()}"
        if part == "happenings":
            happen(folder, record)
        else:
            disturb(folder, part, record)


if __name__ == "__main__":
    main()
