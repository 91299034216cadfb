"""A measurement on the terminal: medians with intervals, the speed-up, and the noise floor beside it."""

from typing import Any

from rich.table import Table

from perf.record.runs import Bench
from perf.stats.stats import Interval
from perf.stats.summary import Side, finite, summarise


def _interval(value: Interval | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _p50(side: Side) -> str:
    return _interval(side.p50_ms) if side.status == "ok" else side.status


def speed_table(bench: Bench) -> Table:
    """One row a batch size; 95 % intervals in brackets."""
    summary = summarise(bench)
    table = Table(
        "batch",
        "dense p50 ms",
        "reduced p50 ms",
        "dense p90",
        "reduced p90",
        "dense img/s",
        "reduced img/s",
        "speed-up",
        "A/A noise",
    )
    for row in summary.rows:
        one, other = row.sides[summary.reference], row.sides[summary.candidate]
        tails = (
            "-" if side.p90_ms is None or side.p90_ms.value is None else f"{side.p90_ms.value:.2f}"
            for side in (one, other)
        )
        rates = ("-" if side.throughput is None else f"{side.throughput.value:.0f}" for side in (one, other))
        table.add_row(
            str(row.batch), _p50(one), _p50(other), *tails, *rates, _interval(row.speedup, 3), _interval(row.noise, 3)
        )
    return table


def _figures(value: Interval | None) -> list[float | None] | None:
    """Value, low, high; an open end (too few rounds) is null."""
    return None if value is None else [value.value, finite(value.low), finite(value.high)]


def speed_record(bench: Bench) -> dict[str, Any]:
    """The table's figures for machines: value, low, high; the raw samples are in the file."""
    summary = summarise(bench)
    return {
        "rows": [
            {
                "batch": row.batch,
                "p50_ms": {name: _figures(side.p50_ms) for name, side in row.sides.items()},
                "images_per_s": {name: _figures(side.throughput) for name, side in row.sides.items()},
                "status": {name: side.status for name, side in row.sides.items()},
                "speedup": _figures(row.speedup),
                "noise": _figures(row.noise),
                "realised_share": row.realised_share,
            }
            for row in summary.rows
        ],
        "preferred_batch_size": summary.preferred_batch_size,
        "warnings": list(bench.warnings),
    }


def best_batch(bench: Bench) -> list[str]:
    """The knee of the throughput curve in a sentence, where there is one."""
    knee = summarise(bench).knee
    return [] if knee is None else [f"preferred_batch_size {knee.batch}: {knee.reason}"]
