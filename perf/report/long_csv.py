"""Every number of a story in long form, as CSV: one a row, unrounded, with its interval where it has one."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Iterator

from perf.stats.stats import Interval, Percentile
from perf.stats.summary import SummaryRow

from .content import Content

HEADER = ("section", "subject", "batch", "measure", "name", "value", "low", "high")
SITE_ERRORS = ("error_uncompensated", "error", "error_held_out", "stream_error", "stream_error_held_out")
Fact = tuple[str, str, str, str, str, float | str, float | str, float | str]


def csv_from_story(story: Content) -> str:
    """Columns as in HEADER; what is unknown or not finite is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(facts(story))
    return out.getvalue()


def facts(story: Content) -> Iterator[Fact]:
    """All sections in reading order."""
    for model in story.models:
        for name in ("params", "macs", "size_bytes", "accuracy", "agreement"):
            yield _fact("models", model.name, name, getattr(model, name))
    for effect in story.effects:
        for name in ("relative_error", "agreement", "accuracy"):
            yield _fact("effects", effect.preset, name, getattr(effect, name))
    if story.summary:
        for row in (*story.summary.rows, *story.summary.end_to_end_rows):
            yield from _row_facts(row)
    if story.parity:
        for link in story.parity.links:
            for field in dataclasses.fields(link.measures):
                yield _fact("parity", link.name, field.name, getattr(link.measures, field.name), batch=link.batch)
    for site in story.sites:
        for name in SITE_ERRORS:
            yield _fact("sites", site.site, name, getattr(site, name))
    for way in story.ways:
        for name in ("share", "predicted_error", "measured_error"):
            yield _fact("ways", way.name, name, getattr(way, name))


def _row_facts(row: SummaryRow) -> Iterator[Fact]:
    for side in row.sides.values():
        values = {"p50_ms": side.p50_ms, "p90_ms": side.p90_ms, "p95_ms": side.p95_ms, "p99_ms": side.p99_ms,
                  "images_per_s": side.throughput, "samples": side.samples, "cv": side.cv,
                  "peak_memory_bytes": side.peak_memory_bytes}  # fmt: skip
        for name, value in values.items():
            yield _fact("latency", side.name, name, value, batch=row.batch, measure=row.measure)
        yield ("latency", side.name, str(row.batch), row.measure, "status", side.status, "", "")
    for name, value in (("speedup", row.speedup), ("noise", row.noise), ("realised_share", row.realised_share)):
        yield _fact("latency", "both", name, value, batch=row.batch, measure=row.measure)


def _fact(
    section: str,
    subject: str,
    name: str,
    value: Interval | Percentile | float | None,
    *,
    batch: int | None = None,
    measure: str = "",
) -> Fact:
    head = section, subject, "" if batch is None else str(batch), measure, name
    if isinstance(value, Interval):
        return (*head, _finite(value.value), _finite(value.low), _finite(value.high))
    if isinstance(value, Percentile):
        return (*head, _finite(value.value), "", _finite(value.upper))
    return (*head, _finite(value), "", "")


def _finite(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value
