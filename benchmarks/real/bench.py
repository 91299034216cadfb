"""What the benchmarks on real weights share: the options of their commands, and what these open."""

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Record
from ground.errors import Missing

from .place import ROOT, assembled
from .setting import setting
from .subject import Calibration, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is measured on, which rows, and where they are written."""

    subject: Subject
    calibration: Calibration
    output: Path
    pattern: str
    again: bool

    def record(self, kind: str, **facts: Any) -> Record:
        return Record(self.output, kind, setting(self.subject, self.calibration) | facts)

    def wanted(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


OPTIONS = (
    click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True),
    click.option("--rows", "pattern", default="*", show_default=True, help="Rows whose name fits this pattern."),
    click.option("--again", is_flag=True, help="Make rows that are there anew."),
    click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To calibrate on."),
    click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="Crops to judge by."),
    click.option("--threads", type=click.IntRange(1), default=2, show_default=True),
    click.option("--ready", type=click.Path(path_type=Path, file_okay=False), default=assembled()),
    click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "work"),
)


def with_bench(run: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options, and its function a Bench; without weights and photographs it says so and ends."""

    @functools.wraps(run)
    def command(
        *,
        output: Path,
        pattern: str,
        again: bool,
        crops: int,
        held_out: int,
        threads: int,
        ready: Path,
        work: Path,
        **others: Any,
    ) -> None:
        try:
            subject = Subject(ready, work, held_out, threads)
        except Missing as reason:
            click.echo(f"skipped: {reason}")
            return
        calibration = Calibration(ready, work, crops)
        run(Bench(subject=subject, calibration=calibration, output=output, pattern=pattern, again=again), **others)

    for option in reversed(OPTIONS):
        command = option(command)
    return command
