"""A benchmark on the terminal and as JSON: medians with intervals, the speed-up, and the A/A noise beside it."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from perf.record.runs import Bench
from perf.stats.energy import EnergySummary
from perf.stats.stats import Interval
from perf.stats.summary import SubjectSummary, SummaryRow, summarise

BRACKETS = " [{}, {}]"


def interval(value: Interval | None, form: str = ".2f") -> str:
    return "-" if value is None else value.describe(form, bounds=BRACKETS)


def ratio_cells(row: SummaryRow) -> tuple[str, str]:
    return interval(row.speedup, ".3f"), interval(row.noise, ".3f")


def median_cell(side: SubjectSummary) -> str:
    """Return the median, or the status of a side without times."""
    return interval(side.p50_ms) if side.status == "ok" else side.status


def noise_caption(one: str) -> dict[str, Any]:
    caption = f"95 % intervals in brackets; A/A noise: {one} against itself, 1 on a quiet machine"
    return {"caption": caption, "caption_justify": "left"}


def speed_table(bench: Bench) -> Table:
    summary = summarise(bench)
    one, other = summary.reference, summary.candidate
    names = (f"{name} {figure}" for figure in ("p50 ms", "p90", "img/s") for name in (one, other))
    energies = [row.energy for row in summary.rows if row.energy is not None]
    joules = [f"{name} J/img" for name in (one, other)] if energies else []
    table = Table("batch", *names, *joules, "speed-up", "A/A noise", **noise_caption(one))
    for row in summary.rows:
        sides = row.sides[one], row.sides[other]
        tails = (
            "-" if side.p90_ms is None or side.p90_ms.value is None else f"{side.p90_ms.value:.2f}" for side in sides
        )
        rates = ("-" if side.throughput is None else f"{side.throughput.value:.0f}" for side in sides)
        spent = (
            ["-" if each is None else f"{each.value:.3g}" for each in (row.joules(side.name) for side in sides)]
            if energies
            else []
        )
        batch = f"{row.batch}\nthrottled" if row.throttled else str(row.batch)
        table.add_row(batch, *map(median_cell, sides), *tails, *rates, *spent, *ratio_cells(row))
    return table


def interval_figures(value: Interval | None) -> list[float | None] | None:
    """Return [value, low, high], with bounds of None after too few rounds, or None without an interval."""
    return None if value is None else list(value.figures)


def throughputs(row: SummaryRow) -> dict[str, list[float | None] | None]:
    return {name: interval_figures(side.throughput) for name, side in row.sides.items()}


def row_figures(row: SummaryRow) -> dict[str, Any]:
    return {
        "p50_ms": {name: interval_figures(side.p50_ms) for name, side in row.sides.items()},
        "status": {name: side.status for name, side in row.sides.items()},
        "messages": {name: side.message for name, side in row.sides.items() if side.message},
        "speedup": interval_figures(row.speedup),
        "noise": interval_figures(row.noise),
        "throttled": list(row.throttled),
    }


def speed_record(bench: Bench) -> dict[str, Any]:
    """Return a benchmark's figures by batch size as JSON values, those with an interval as value, low, high."""
    summary = summarise(bench)
    return {
        "rows": [
            {
                "batch": row.batch,
                **row_figures(row),
                "images_per_s": throughputs(row),
                "repeats": {name: interval_figures(gain) for name, gain in row.repeats.items()},
                "realised_share": row.realised_share,
                "energy": None if row.energy is None else energy_figures(row.energy),
                "launches": None if row.launches is None else asdict(row.launches),
            }
            for row in summary.rows
        ],
        "preferred_batch_size": summary.preferred_batch_size,
        "warnings": list(bench.warnings),
    }


def energy_figures(energy: EnergySummary) -> dict[str, Any]:
    return {
        "sensor": energy.sensor,
        "joules_per_image": {name: interval_figures(joules) for name, joules in energy.joules.items()},
        "ratio": interval_figures(energy.ratio),
        "noise": interval_figures(energy.noise),
        "idle_w": energy.idle_w,
    }


def energy_lines(bench: Bench) -> list[str]:
    return [f"batch {row.batch}, energy: {row.energy.line}" for row in summarise(bench).rows if row.energy is not None]


def repeat_lines(bench: Bench) -> list[str]:
    times = "times as fast on one repeated batch as on varied ones"
    return [
        f"batch {row.batch}, {name}: {gain.describe('.3f', bounds=BRACKETS)} {times}"
        for row in summarise(bench).rows
        for name, gain in row.repeats.items()
    ]


def launch_lines(bench: Bench) -> list[str]:
    return [f"batch {row.batch}, {row.launches.sentence}" for row in summarise(bench).rows if row.launches]


def best_batch(bench: Bench) -> list[str]:
    knee = summarise(bench).knee
    return [] if knee is None else [f"preferred_batch_size {knee.batch}: {knee.reason}"]
