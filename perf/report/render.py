"""Reports as Markdown, JUnit XML or CSV."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from ground.text import csv_text, markdown_line, printable
from perf.stats.stats import Interval, Percentile
from perf.stats.summary import SummaryRow

from .content import Content, build_lead, list_verdicts
from .numbers import ReportTable
from .tables import MEASURES, build_tables

HEADER = ("section", "subject", "batch", "measure", "name", "value", "low", "high")
SITE_ERRORS = ("error_uncompensated", "error", "error_held_out", "stream_error", "stream_error_held_out")
CsvRow = tuple[str, str, str, str, str, float | str, float | str, float | str]


def csv_from_content(content: Content) -> str:
    """Return all numbers, unrounded, with their intervals as CSV with HEADER; unknown ones are empty."""
    return csv_text((HEADER, *_csv_rows(content)))


def _csv_rows(content: Content) -> Iterator[CsvRow]:
    yield from _fields("models", content.models, ("params", "macs", "size_bytes", "accuracy", "agreement"))
    yield from _fields("effects", content.effects, ("relative_error", "agreement", "accuracy"))
    if content.summary:
        for row in (*content.summary.rows, *content.summary.end_to_end_rows):
            yield from _latency_rows(row)
    if content.parity:
        for link in content.parity.links:
            for field in dataclasses.fields(link.measures):
                yield _row("parity", link.name, field.name, getattr(link.measures, field.name), batch=link.batch)
        for each in content.parity.classes:
            for name in ("index", "images", "accuracy_dense", "accuracy", "change"):
                yield _row("classes", each.name or str(each.index), name, getattr(each, name))
    yield from _fields("sites", content.sites, SITE_ERRORS)
    for block, entering, away, behind in content.merging.blocks if content.merging else ():
        for name, tokens in (("tokens_entering", entering), ("tokens_away", away), ("tokens_behind", behind)):
            yield _row("merging", f"block {block}", name, tokens)
    yield from _fields("effort", content.effort, MEASURES)
    for batch in content.history.batches if content.history else ():
        for series in batch.series:
            for release, value in zip(content.history.releases if content.history else (), series.values, strict=True):
                yield _row("history", release, series.name, value, batch=batch.batch)
    yield from _fields("ways", content.ways, ("share", "predicted_error", "measured_error", "median_error"))


def _fields(section: str, lines: Sequence[Any], names: Sequence[str]) -> Iterator[CsvRow]:
    for line in lines:
        subject = getattr(line, dataclasses.fields(line)[0].name)
        for name in names:
            yield _row(section, subject, name, getattr(line, name))


def _latency_rows(row: SummaryRow) -> Iterator[CsvRow]:
    for side in row.sides.values():
        values = {"p50_ms": side.p50_ms, "p90_ms": side.p90_ms, "p95_ms": side.p95_ms, "p99_ms": side.p99_ms,
                  "images_per_s": side.throughput, "samples": side.samples, "cv": side.cv,
                  "peak_memory_bytes": side.peak_memory_bytes}  # fmt: skip
        for name, value in values.items():
            yield _row("latency", side.name, name, value, batch=row.batch, measure=row.measure)
        yield ("latency", side.name, str(row.batch), row.measure, "status", side.status, "", "")
    if row.mark:
        yield ("latency", "both", str(row.batch), row.measure, row.mark, ", ".join(row.throttled), "", "")
    for subject, gain in row.repeats.items():
        yield _row("latency", subject, "gain_on_repeats", gain, batch=row.batch, measure=row.measure)
    for name, value in (("speedup", row.speedup), ("noise", row.noise), ("realised_share", row.realised_share)):
        yield _row("latency", "both", name, value, batch=row.batch, measure=row.measure)
    if row.energy is not None:
        for subject, joules in row.energy.joules.items():
            yield _row("energy", subject, "joules_per_image", joules, batch=row.batch)
        for name, of_both in (("ratio", row.energy.ratio), ("noise", row.energy.noise)):
            yield _row("energy", "both", name, of_both, batch=row.batch)
        yield _row("energy", "machine", "idle_w", row.energy.idle_w, batch=row.batch)


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


def markdown_from_content(content: Content) -> str:
    """Return the report's tables without plots, for a pull request or a terminal."""
    lines = [f"# {markdown_line(content.title)}", ""]
    lines += [
        f"**{markdown_line(stated.headline)}** {markdown_line(stated.why)}  " for stated in list_verdicts(content)
    ]
    lines.append("")
    lines += [markdown_line(build_lead(content)), ""] if build_lead(content) else []
    for table in build_tables(content).values():
        lines += [*markdown_from_table(table), ""]
    if content.commands:
        longest = max(map(len, re.findall("`+", "\n".join(content.commands))), default=0)
        fence = "`" * max(3, longest + 1)  # longer than any run of backticks inside
        lines += ["## Commands", "", fence, *map(printable, content.commands), fence, ""]
    return "\n".join(lines)


def markdown_from_table(table: ReportTable) -> list[str]:
    head, *body = (f"| {' | '.join(map(markdown_line, cells))} |" for cells in (table.columns, *table.rows))
    lines = [f"## {markdown_line(table.title)}", "", head, "|" + "---|" * len(table.columns), *body]
    return [*lines, "", markdown_line(table.note)] if table.note else lines


TAGS = {
    "PASS": "system-out",
    "NOTED": "system-out",
    "FAIL": "failure",
    "INCONCLUSIVE": "error",
    "NOT-COMPARABLE": "error",
}


def junit_from_content(content: Content) -> str:
    """Return links, structural tests and gate rules as test cases; FAIL is a failure, an undecided one an error."""
    suites = ElementTree.Element("testsuites", name=printable(content.title))
    links, structure = (content.parity.links, content.parity.structure) if content.parity else ((), ())
    lines = {"parity": content.parity.line} if content.parity else {}
    cases: dict[str, list[tuple[str, str, str]]] = {
        "parity": [(link.name, link.status, link.reason) for link in links],
        "structure": [(f"{test.test} of {test.candidate}", test.status, test.reason) for test in structure],
        "gate": [(line.rule, line.verdict, line.message) for line in content.gate.rules],
    }
    for suite, rows in cases.items():
        if rows:
            _suite(suites, suite, rows, lines.get(suite))
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _suite(parent: ElementTree.Element, name: str, rows: Sequence[tuple[str, str, str]], line: str | None) -> None:
    tags = [TAGS.get(status, "skipped") for _, status, _ in rows]
    totals = {"failures": tags.count("failure"), "skipped": tags.count("skipped"), "errors": tags.count("error")}
    counts = {"tests": str(len(rows)), **{key: str(total) for key, total in totals.items()}}
    suite = ElementTree.SubElement(parent, "testsuite", {"name": name, **counts})
    if line is not None:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(properties, "property", {"name": "verdict", "value": printable(line)})
    for (case, status, why), tag in zip(rows, tags, strict=True):
        element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": printable(case)})
        reason = printable(why)
        if tag == "system-out":
            ElementTree.SubElement(element, tag).text = reason
        else:
            ElementTree.SubElement(element, tag, {"message": reason if status == "FAIL" else f"{status}: {reason}"})
