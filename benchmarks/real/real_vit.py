"""Every method on real weights and real photographs: a DINOv2 ViT-S/14, and a dense saliency head that is left alone.

    make real
    python -m benchmarks.real.real_vit --output benchmarks/results/real_vit.json

Fitted to crops of 37 photographs, judged on crops of 16 others. A row is one `reduce` command, in a process of its own,
beside the moments that all methods share; what it costs is told in CPU seconds and in bare forward passes over the same
crops. The record is written after every row and a run goes on where another stopped; `--rows PATTERN --again` makes
rows anew, all others stay as they are.
"""

from collections.abc import Sequence
from typing import Any

import click

from benchmarks.harness import Record
from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.rows import METHODS, OVERFITTING, PHOTOGRAPHS, SHARES, Method
from benchmarks.real.subject import Calibration, Subject

KIND = "benchmarks/real-vit"
KEY, PHOTOGRAPHS_KEY = ("method", "share"), ("method", "share", "photographs")


def chosen(bench: Bench, shares: Sequence[float]) -> list[tuple[Method, float]]:
    """The rows whose method is wanted, at those of its shares that are asked for, or at all."""
    fitting = [method for method in METHODS if bench.wanted(method.name)]
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


def make_photographs(record: Record, bench: Bench, counts: Sequence[int]) -> None:
    """The same methods fitted to all crops of fewer photographs, judged on those and on the held-out ones."""
    for count in counts:
        calibration = bench.calibration.of(count)
        for method in OVERFITTING:
            (share,) = method.shares
            key = {"method": method.name, "share": share, "photographs": calibration.photographs}
            if not bench.again and record.has("photographs", key):
                continue
            row = bench.subject.row(method, share, calibration, fitted=True)
            record.put("photographs", row, PHOTOGRAPHS_KEY)
            errors = f"fitted {row['fitted_class_error']:.3f}, held out {row['class_error']:.3f}"
            click.echo(f"{method.name}, {calibration.photographs} photographs: class {errors}")


def _numbers(kind: type) -> Any:
    return lambda _, __, value: tuple(kind(part) for part in value.split(",")) if value else ()


@click.command(help=__doc__)
@click.option("--shares", callback=_numbers(float), default="", help=f"Default: {','.join(map(str, SHARES))}.")
@click.option("--photographs", callback=_numbers(int), default="", help=f"Such as {','.join(map(str, PHOTOGRAPHS))}.")
@with_bench
def main(bench: Bench, *, shares: tuple[float, ...], photographs: tuple[int, ...]) -> None:
    record, rows = bench.record(KIND), chosen(bench, shares)
    wanted = [(method, share) for method, share in rows if bench.again or not record.has("rows", _key(method, share))]
    make_rows(record, bench.subject, bench.calibration, wanted)
    make_photographs(record, bench, photographs)


def _key(method: Method, share: float) -> dict[str, Any]:
    return {"method": method.name, "share": share}


if __name__ == "__main__":
    main()
