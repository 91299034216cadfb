"""Every number of a report in long form, as CSV: one a row, unrounded, with its interval where it has one."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator

from ground.text import csv_cell
from perf.stats.stats import Interval, Percentile
from perf.stats.summary import SummaryRow

from .content import Content
from .effort import MEASURES

HEADER = ("section", "subject", "batch", "measure", "name", "value", "low", "high")
SITE_ERRORS = ("error_uncompensated", "error", "error_held_out", "stream_error", "stream_error_held_out")
CsvRow = tuple[str, str, str, str, str, float | str, float | str, float | str]


def csv_from_content(content: Content) -> str:
    """Columns as in HEADER; what is unknown or not finite is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(map(csv_cell, row) for row in _rows(content))
    return out.getvalue()


def _rows(content: Content) -> Iterator[CsvRow]:
    """All sections in reading order."""
    for model in content.models:
        for name in ("params", "macs", "size_bytes", "accuracy", "agreement"):
            yield _row("models", model.name, name, getattr(model, name))
    for effect in content.effects:
        for name in ("relative_error", "agreement", "accuracy"):
            yield _row("effects", effect.preset, name, getattr(effect, name))
    if content.summary:
        for row in (*content.summary.rows, *content.summary.end_to_end_rows):
            yield from _latency_rows(row)
    if content.parity:
        for link in content.parity.links:
            for field in dataclasses.fields(link.measures):
                yield _row("parity", link.name, field.name, getattr(link.measures, field.name), batch=link.batch)
    for site in content.sites:
        for name in SITE_ERRORS:
            yield _row("sites", site.site, name, getattr(site, name))
    for block, entering, away, behind in content.merging.blocks if content.merging else ():
        for name, tokens in (("tokens_entering", entering), ("tokens_away", away), ("tokens_behind", behind)):
            yield _row("merging", f"block {block}", name, tokens)
    for line in content.effort:
        for name in MEASURES:
            yield _row("effort", line.step, name, getattr(line, name))
    for batch in content.history.batches if content.history else ():
        for series in batch.series:
            for release, value in zip(content.history.releases if content.history else (), series.values, strict=True):
                yield _row("history", release, series.name, value, batch=batch.batch)
    for way in content.ways:
        for name in ("share", "predicted_error", "measured_error"):
            yield _row("ways", way.name, name, getattr(way, name))


def _latency_rows(row: SummaryRow) -> Iterator[CsvRow]:
    for side in row.sides.values():
        values = {"p50_ms": side.p50_ms, "p90_ms": side.p90_ms, "p95_ms": side.p95_ms, "p99_ms": side.p99_ms,
                  "images_per_s": side.throughput, "samples": side.samples, "cv": side.cv,
                  "peak_memory_bytes": side.peak_memory_bytes}  # fmt: skip
        for name, value in values.items():
            yield _row("latency", side.name, name, value, batch=row.batch, measure=row.measure)
        yield ("latency", side.name, str(row.batch), row.measure, "status", side.status, "", "")
    for subject, gain in row.repeats.items():
        yield _row("latency", subject, "gain_on_repeats", gain, batch=row.batch, measure=row.measure)
    for name, value in (("speedup", row.speedup), ("noise", row.noise), ("realised_share", row.realised_share)):
        yield _row("latency", "both", name, value, batch=row.batch, measure=row.measure)


def _row(
    section: str,
    subject: str,
    name: str,
    value: Interval | Percentile | float | None,
    *,
    batch: int | None = None,
    measure: str = "",
) -> CsvRow:
    head = section, subject, "" if batch is None else str(batch), measure, name
    if isinstance(value, Interval):
        shown, low, high = map(_finite, value.figures)
        return (*head, shown, low, high)
    if isinstance(value, Percentile):
        return (*head, _finite(value.value), "", _finite(value.upper))
    return (*head, _finite(value), "", "")


def _finite(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value
