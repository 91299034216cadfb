"""Time `reduce --macs 0.7` of the digits example, alone and next to busy processes, by how OpenMP threads wait.

    python -m benchmarks.speed.busy --output benchmarks/results/busy.json

Two sides run in turns, each as a whole process: the command as it is (passive threads) and the same command with
OpenMP's default, which spins. Next to them: nothing, another torch process, or a loop that keeps one CPU busy.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from corp_deploy.demo.run import EXAMPLE, write_images
from ground.files import write_json
from ground.threads import THREADS, WAIT_POLICIES
from perf.timing.watch import environment

SIDES: Mapping[str, Sequence[str]] = {
    "passive": ("-m", "corp_deploy"),
    "default": ("-c", "from corp_deploy.cli import main; main(prog_name='corp-deploy')"),  # without the policy
}
_TORCH = "import torch; x = torch.randn(1024, 1024)\nwhile True: x = (x @ x).softmax(-1)"
_LOOP = "while True: pass"
NEIGHBOURS: Mapping[str, str | None] = {"nothing": None, "a torch process": _TORCH, "a busy loop": _LOOP}


def clean_environment() -> dict[str, str]:
    """Return this environment without settings of threads, so that each side has its own."""
    return {name: value for name, value in os.environ.items() if name not in (*WAIT_POLICIES, THREADS)}


def timed(command: Sequence[object]) -> dict[str, float]:
    """Run a process that has to succeed and return its seconds on the clock and of the CPU."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], env=clean_environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"{command[0]} {command[1]} ended with {process.returncode}")
    return {"wall_s": round(wall_s, 3), "cpu_s": round(usage.ru_utime + usage.ru_stime, 3)}


@contextmanager
def beside(code: str | None) -> Iterator[None]:
    """Keep a process with this code running, if any."""
    if code is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", code], env=clean_environment()) as neighbour:
        try:
            time.sleep(5)  # it imports torch first
            yield
        finally:
            neighbour.kill()


def medians(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each neighbour: medians of both sides, and the median of the rounds' ratios."""
    lines = []
    for neighbour in dict.fromkeys(row["beside"] for row in rows):
        line: dict[str, Any] = {"beside": neighbour}
        for clock in ("wall_s", "cpu_s"):
            by_side = {
                side: [row[clock] for row in rows if (row["beside"], row["side"]) == (neighbour, side)]
                for side in SIDES
            }
            line |= {f"{side}_{clock}": statistics.median(values) for side, values in by_side.items()}
            ratios = [new / old for new, old in zip(by_side["passive"], by_side["default"], strict=True)]
            line[f"ratio_{clock}"] = round(statistics.median(ratios), 3)
        lines.append(line)
    return lines


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--only", type=click.Choice(list(NEIGHBOURS)), multiple=True)
def main(output: Path, rounds: int, only: tuple[str, ...]) -> None:
    """Measure and write the record."""
    machine, rows = environment(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_images(home)
        model, moments = ("--model", EXAMPLE / "model", "--quiet"), home / "moments.safetensors"
        images = ("--images", home / "calibration.npz")
        timed((*SIDES["passive"], "calibrate", *model, *images, "-o", moments))
        for name in only or NEIGHBOURS:
            with beside(NEIGHBOURS[name]):
                for number in range(rounds):
                    for side in sorted(SIDES, reverse=bool(number % 2)):
                        reduced = home / f"{side} {len(rows)}"
                        words = ("reduce", *model, *images, "--moments", moments, "--macs", 0.7, "-o", reduced)
                        row = {"beside": name, "round": number, "side": side, **timed((*SIDES[side], *words))}
                        rows.append(row)
                        click.echo(row)
    record = {"kind": "benchmarks/busy", "version": 1, "environment": machine, "rows": rows, "medians": medians(rows)}
    write_json(output, record)


if __name__ == "__main__":
    main()
