"""Every reader of foreign files against at least 100,000 files each, by coverage (atheris) and by values (hypothesis).

    pip install atheris
    python -m benchmarks.trust.fuzz --output benchmarks/results/fuzz.json

Each reader has a process of its own, whose memory is bounded and whose openings are seen. What raises anything but
BadInput, takes more than 5 CPU seconds, opens or starts what is none of its own is a finding. A run that was
interrupted goes on where it stood.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from corp_deploy.machine import versions
from ground.files import write_json
from perf.timing.watch import environment

from .readers import made_home, readers

INPUTS = {"atheris": 100_000, "hypothesis": 4_000}
LONGEST_S = 3 * 3600


def tried(reader: str, driver: str, inputs: int, home: Path) -> dict[str, Any]:
    """The counts and findings of one process; that it ended by itself is one."""
    at = home / f"{driver}-{reader.replace(' ', '-')}.json"
    words = [driver, reader, "--home", str(home), "--inputs", str(inputs), "--at", str(at)]
    with at.with_suffix(".log").open("wb") as log:
        code = subprocess.run(
            [sys.executable, "-m", "benchmarks.trust.fuzz.one", *words],
            stdout=log,
            stderr=log,
            timeout=LONGEST_S,
            check=False,
        ).returncode
    counts: dict[str, Any] = json.loads(at.read_text()) if at.exists() else {"inputs": 0, "findings": {}}
    if code:
        tail = at.with_suffix(".log").read_text(errors="replace")[-500:]
        counts["findings"][f"the process ended with {code}"] = {"count": 1, "message": tail}
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--atheris", type=int, default=INPUTS["atheris"], help="Inputs a reader.")
    parser.add_argument("--hypothesis", type=int, default=INPUTS["hypothesis"], help="Inputs a reader.")
    arguments = parser.parse_args()
    home = arguments.work.resolve()
    if not (home / "served").exists():
        home.mkdir(parents=True, exist_ok=True)
        made_home(home)
    record: dict[str, Any] = {"kind": "fuzz", "version": 1, "readers": {}}
    if arguments.output.is_file():
        record = json.loads(arguments.output.read_text())
    record |= {"environment": environment(), "versions": versions()}
    for name in readers(home):
        own = record["readers"].setdefault(name, {})
        for driver, inputs in (("hypothesis", arguments.hypothesis), ("atheris", arguments.atheris)):
            if own.get(driver, {}).get("inputs", 0) < inputs:
                own[driver] = tried(name, driver, inputs, home)
                write_json(arguments.output, record, indent=1)
            found = own[driver]
            print(f"{name}, {driver}: {found['inputs']} inputs, {len(found['findings'])} findings", flush=True)


if __name__ == "__main__":
    main()
