"""Every method on real weights and real photographs: a DINOv2 ViT-S/14, and a dense saliency head that is left alone.

    make real
    python -m benchmarks.real_vit --output benchmarks/results/real_vit.json

Fitted to crops of 37 photographs, judged on crops of 16 others. A row is one `reduce` command, in a process of its own,
beside the moments that all methods share; what it costs is told in CPU seconds and in bare forward passes over the same
crops. The record is written after every row and a run goes on where another stopped; `--rows PATTERN --again` makes
rows anew, all others stay as they are.
"""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.real.place import ROOT, assembled
from benchmarks.real.record import Record
from benchmarks.real.rows import METHODS, OVERFITTING, PHOTOGRAPHS, SHARES, Method
from benchmarks.real.setting import setting
from benchmarks.real.subject import Calibration, Subject
from ground.errors import Missing

KIND = "benchmarks/real-vit"
KEY, PHOTOGRAPHS_KEY = ("method", "share"), ("method", "share", "photographs")


def chosen(methods: Sequence[Method], pattern: str, shares: Sequence[float]) -> list[tuple[Method, float]]:
    """The rows whose method fits the pattern, at those of its shares that are asked for, or at all."""
    fitting = [method for method in methods if fnmatch.fnmatchcase(method.name, pattern)]
    return [(method, share) for method in fitting for share in method.shares if not shares or share in shares]


def bare_pass_s(record: Record, subject: Subject, calibration: Calibration) -> float:
    """CPU seconds of a bare forward pass over the calibration crops, taken once."""
    if "bare_pass_s" not in record:
        record.set("bare_pass_s", subject.bare_pass_s(calibration.images))
    return float(record["bare_pass_s"])


def make_rows(record: Record, subject: Subject, calibration: Calibration, rows: Sequence[tuple[Method, float]]) -> None:
    """The table by method and share, what each one's calibration took beside it."""
    for method, share in rows:
        one_pass = bare_pass_s(record, subject, calibration)
        _, calibrated = subject.moments(method, calibration)
        made = {"calibrate": f"calibrate {method.calibrate}".strip(), **calibrated}
        record.put("calibrations", made | {"passes": calibrated["cpu_s"] / one_pass}, ("calibrate",))
        row = subject.row(method, share, calibration)
        record.put("rows", row | {"passes": row["cpu_s"] / one_pass}, KEY)
        record.order("rows", "method", [method.name for method in METHODS])
        click.echo(f"{method.name} at {share:g}: class {row['class_error']:.3f}, {row['cpu_s']:.0f} CPU s")


def make_photographs(record: Record, subject: Subject, crops: int, counts: Sequence[int], again: bool) -> None:
    """The same methods fitted to all crops of fewer photographs, judged on those and on the held-out ones."""
    for count in counts:
        calibration = Calibration(subject.ready, subject.work, crops, count)
        for method in OVERFITTING:
            (share,) = method.shares
            key = {"method": method.name, "share": share, "photographs": calibration.photographs}
            if not again and record.has("photographs", key):
                continue
            row = subject.row(method, share, calibration, fitted=True)
            record.put("photographs", row, PHOTOGRAPHS_KEY)
            errors = f"fitted {row['fitted_class_error']:.3f}, held out {row['class_error']:.3f}"
            click.echo(f"{method.name}, {calibration.photographs} photographs: class {errors}")


def _numbers(kind: type) -> Any:
    return lambda _, __, value: tuple(kind(part) for part in value.split(",")) if value else ()


@click.command(help=__doc__)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--rows", "pattern", default="*", show_default=True, help="Methods whose name fits this pattern.")
@click.option("--shares", callback=_numbers(float), default="", help=f"Default: {','.join(map(str, SHARES))}.")
@click.option("--photographs", callback=_numbers(int), default="", help=f"Such as {','.join(map(str, PHOTOGRAPHS))}.")
@click.option("--again", is_flag=True, help="Make rows that are there anew.")
@click.option("--crops", type=click.IntRange(1, 512), default=512, show_default=True, help="To calibrate on.")
@click.option("--held-out", type=click.IntRange(1, 128), default=128, show_default=True, help="Crops to judge by.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--ready", type=click.Path(path_type=Path, file_okay=False), default=assembled())
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "work")
def main(
    output: Path,
    pattern: str,
    shares: tuple[float, ...],
    photographs: tuple[int, ...],
    again: bool,
    crops: int,
    held_out: int,
    threads: int,
    ready: Path,
    work: Path,
) -> None:
    try:
        subject = Subject(ready, work, held_out, threads)
    except Missing as reason:
        click.echo(f"skipped: {reason}")
        return
    calibration = Calibration(ready, work, crops)
    record = Record(output, KIND, setting(subject, calibration))
    rows = chosen(METHODS, pattern, shares)
    wanted = [(method, share) for method, share in rows if again or not record.has("rows", _key(method, share))]
    make_rows(record, subject, calibration, wanted)
    make_photographs(record, subject, crops, photographs, again)


def _key(method: Method, share: float) -> dict[str, Any]:
    return {"method": method.name, "share": share}


if __name__ == "__main__":
    main()
