"""The report: HTML, Markdown, JUnit, CSV and plots from the records. It prints their verdicts and computes none."""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Mapping
from html import escape
from typing import Any
from xml.etree import ElementTree

from . import plots
from .page import page
from .plots import Bounded, Change, Gain, Point, Series
from .stats import Interval
from .story import Story, story_from_record
from .summary import SummaryRow
from .tables import Table, percent, tables

TONES = {
    "PASS": "pass",
    "FAIL": "fail",
    "INCONCLUSIVE": "note",
    "NOT-COMPARABLE": "note",
    "NOTED": "note",
    "UNJUDGED": "note",
}
# Tables that stand beside plots of the same numbers come after them; these open the page.
FIRST = ("models", "effects")


def html(record: Mapping[str, Any]) -> str:
    """One self-contained page; see story_from_record for the record's keys and what it raises."""
    story = story_from_record(record)
    made = {table.key: table for table in tables(story)}
    figures = _figures(story)
    parts = [f"<h1>{escape(story.title)}</h1>", _verdict(story), _tiles(story)]
    parts += [_section(made[key]) for key in FIRST if key in made]
    parts.append(
        _gallery("Speed", "Medians with 95 % intervals.", figures, ("latency", "throughput", "speedup", "samples"))
    )
    parts += [_section(made[key]) for key in ("latency", "gate") if key in made]
    parts.append(_gallery("Fidelity", "", figures, ("parity", "sites")))
    rest = [table for key, table in made.items() if key not in (*FIRST, "latency", "gate")]
    parts += [_section(table) for table in rest]
    parts.append(_commands(story))
    return page(story.title, "\n".join(part for part in parts if part))


def markdown(record: Mapping[str, Any]) -> str:
    """The same tables for a pull request or a terminal."""
    story = story_from_record(record)
    lines = [f"# {story.title}", "", *(f"**{name} {verdict}**: {why}" for name, verdict, why in _verdicts(story)), ""]
    lines += [f"{_lead(story)}", ""] if _lead(story) else []
    for table in tables(story):
        lines += [f"## {table.title}", "", *_markdown_rows(table), ""]
        lines += [table.note, ""] if table.note else []
    if story.commands:
        lines += ["## Commands", "", "```", *story.commands, "```", ""]
    return "\n".join(lines)


def csv(record: Mapping[str, Any]) -> str:
    """Every cell of every table in long form: table, row, column, value."""
    out = io.StringIO()
    writer = comma_separated.writer(out, lineterminator="\n")
    writer.writerow(("table", "row", "name", "column", "value"))
    for table in tables(story_from_record(record)):
        for place, row in enumerate(table.rows, start=1):
            cells = zip(table.columns[1:], row[1:], strict=True)
            writer.writerows((table.key, place, row[0], column, value) for column, value in cells)
    return out.getvalue()


def junit(record: Mapping[str, Any]) -> str:
    """Links, structural tests and gate rules as test cases: FAIL is a failure, what could not be judged is skipped."""
    story = story_from_record(record)
    suites = ElementTree.Element("testsuites", name=story.title)
    cases: dict[str, list[tuple[str, str, str]]] = {"parity": [], "structure": [], "gate": []}
    if story.parity:
        cases["parity"] = [(link.name, link.status, link.reason) for link in story.parity.links]
        cases["structure"] = [(f"{f.test} of {f.candidate}", f.status, f.reason) for f in story.parity.structure]
    cases["gate"] = [(line.rule, line.verdict, line.message) for line in story.gate]
    for suite, rows in cases.items():
        if rows:
            _suite(suites, suite, rows)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def svgs(record: Mapping[str, Any]) -> dict[str, str]:
    """Every plot as a file of its own: name without suffix -> SVG text."""
    return {name: plots.standalone(svg) for name, (_, _, svg) in _figures(story_from_record(record)).items()}


def _suite(parent: ElementTree.Element, name: str, rows: list[tuple[str, str, str]]) -> None:
    failures = sum(status == "FAIL" for _, status, _ in rows)
    skipped = sum(status not in ("PASS", "FAIL", "NOTED") for _, status, _ in rows)
    counts = {"tests": str(len(rows)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
    suite = ElementTree.SubElement(parent, "testsuite", {"name": name, **counts})
    for case, status, why in rows:
        element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": case})
        if status == "FAIL":
            ElementTree.SubElement(element, "failure", {"message": why})
        elif status not in ("PASS", "NOTED"):
            ElementTree.SubElement(element, "skipped", {"message": f"{status}: {why}"})
        else:
            ElementTree.SubElement(element, "system-out").text = why


def _verdicts(story: Story) -> list[tuple[str, str, str]]:
    """Name, verdict and reason of each record that has one."""
    found = []
    if story.gate_verdict is not None:
        unmet = [line.message for line in story.gate if line.verdict != "PASS"]
        found.append(("gate", story.gate_verdict, "; ".join(unmet) or f"{len(story.gate)} rules hold"))
    if story.parity is not None:
        found.append(("parity", story.parity.verdict, story.parity.reason))
    return found


def _verdict(story: Story) -> str:
    verdicts = _verdicts(story)
    tones = [TONES.get(verdict, "note") for _, verdict, _ in verdicts]
    tone = next((t for t in ("fail", "note", "pass") if t in tones), "")
    chips = "".join(
        f'<span class="chip {t}">{escape(f"{n} {v}")}</span>' for (n, v, _), t in zip(verdicts, tones, strict=True)
    )
    chips = chips or '<span class="chip">no verdict: nothing was verified</span>'
    whys = "".join(f'<p class="why">{escape(f"{name}: {why}")}</p>' for name, _, why in verdicts)
    lead = _lead(story)
    return (
        f'<div class="verdict {tone}"><p>{chips}</p>{f"<p class=lead>{escape(lead)}</p>" if lead else ""}{whys}</div>'
    )


def _lead(story: Story) -> str:
    """The facts in one sentence, taken from the records."""
    facts = []
    row = _headline_row(story)
    if story.summary and row and row.speedup:
        names = list(row.sides)
        facts.append(f"{names[-1]} answers {row.speedup.value:.2f} times as fast as {names[0]} at batch {row.batch}")
    if story.parity:
        whole = _whole(story)
        facts.append(f"the top answer is the same on {percent(whole[0])} of {whole[1]:,} images")
    sentence = " and ".join(facts)
    return sentence[:1].upper() + sentence[1:] + "." if sentence else ""


def _headline_row(story: Story) -> SummaryRow | None:
    """The preferred batch size where one was found, else the largest that ran on both sides."""
    if story.summary is None:
        return None
    ran = [row for row in story.summary.rows if row.speedup]
    preferred = [row for row in ran if row.batch == story.summary.preferred_batch_size]
    chosen = preferred or ran
    return chosen[-1] if chosen else None


def _whole(story: Story) -> tuple[float, int]:
    assert story.parity is not None
    link = next((link for link in story.parity.links if link.kind == "whole"), story.parity.links[-1])
    return link.measures.top1_agreement, link.measures.images


def _tiles(story: Story) -> str:
    tiles = []
    row = _headline_row(story)
    if row and row.speedup:
        bounds = (
            f"{row.speedup.low:.2f} to {row.speedup.high:.2f}" if math.isfinite(row.speedup.high) else "too few rounds"
        )
        tiles.append((f"{row.speedup.value:.2f}×", f"speed-up at batch {row.batch} ({bounds})"))
    if story.parity:
        agreement, images = _whole(story)
        tiles.append((percent(agreement), f"same top answer on {images:,} images"))
    if len(story.models) >= 2:
        dense, reduced = story.models[:2]
        for what, before, after in (
            ("multiply-adds", dense.macs, reduced.macs),
            ("parameters", dense.params, reduced.params),
        ):
            if before and after:
                tiles.append((f"{after / before - 1:+.0%}".replace("-", "−"), f"{what}"))
    return (
        f'<ul class="tiles">{"".join(f"<li><b>{escape(b)}</b><span>{escape(s)}</span></li>" for b, s in tiles)}</ul>'
        if tiles
        else ""
    )


def _figures(story: Story) -> dict[str, tuple[str, str, str]]:
    """Name -> caption, the sentence under it, SVG."""
    found: dict[str, tuple[str, str, str]] = {}
    if story.summary:
        found |= _speed_figures(story)
    if story.parity:
        found["parity"] = (
            "Error of each link",
            "Relative error of the logits; the tick is what the link may have.",
            _chain(story),
        )
    known = [s for s in story.sites if s.error is not None and s.error_uncompensated is not None]
    if known:
        changes = [Change(label=s.site, before=s.error_uncompensated or 0.0, after=s.error or 0.0) for s in known]
        drawn = plots.dumbbells(
            changes,
            title="Error of each site",
            across="relative error of the site's output",
            before="only cut",
            after="compensated",
        )
        found["sites"] = ("Error of each site", "Before and after the compensation, on the calibration images.", drawn)
    return found


def _speed_figures(story: Story) -> dict[str, tuple[str, str, str]]:
    assert story.summary is not None
    rows = story.summary.rows
    measure = rows[0].measure.replace("_", " ") if rows else ""
    found = {}
    latencies = _series(rows, "p50_ms")
    if latencies:
        drawn = plots.curve(latencies, title="Latency by batch", unit="ms", across="batch size", log=True)
        found["latency"] = ("Latency by batch", f"Median {measure} time, milliseconds, log scale.", drawn)
    rates = _series(rows, "throughput")
    if rates:
        drawn = plots.curve(rates, title="Throughput by batch", unit="images/s", across="batch size", log=False)
        found["throughput"] = ("Throughput by batch", "Images per second.", drawn)
    gains = [_gain(row, story) for row in rows]
    if any(gain.ratio for gain in gains):
        drawn = plots.gains(gains, title="Speed-up by batch", across="dense time / reduced time")
        found["speedup"] = (
            "Speed-up beside noise and promise",
            "Grey: dense against itself. Dashed: what the multiply-adds promise.",
            drawn,
        )
    samples = {
        f"b {row.batch}": {name: side.times_ms for name, side in row.sides.items() if side.times_ms} for row in rows
    }
    samples = {label: sides for label, sides in samples.items() if sides}
    if samples:
        drawn = plots.distribution(samples, title="Distribution of samples", unit="ms")
        found["samples"] = (
            "Distribution of samples",
            "Every kept call, each batch on its own scale; the line is the median.",
            drawn,
        )
    return found


def _series(rows: tuple[SummaryRow, ...], field: str) -> list[Series]:
    names = list(dict.fromkeys(name for row in rows for name in row.sides))
    drawn = []
    for name, tone in zip(names, ("dense", "reduced"), strict=False):
        sides = [(row.batch, row.sides[name]) for row in rows if name in row.sides]
        values = [(batch, side.p50_ms if field == "p50_ms" else side.throughput) for batch, side in sides]
        points = tuple(_point(str(batch), value) for batch, value in values if value is not None)
        if points:
            drawn.append(Series(name=name, tone=tone, points=points))
    return drawn


def _point(label: str, value: Interval) -> Point:
    known = math.isfinite(value.high) and value.low > 0
    return Point(
        label=label,
        value=value.value,
        low=value.low if known else value.value,
        high=value.high if known else value.value,
    )


def _gain(row: SummaryRow, story: Story) -> Gain:
    assert story.bench is not None
    before, after = (subject.macs for subject in story.bench.subjects)
    noise = row.noise if row.noise and math.isfinite(row.noise.high) else None
    return Gain(
        label=f"batch {row.batch}",
        ratio=_point(str(row.batch), row.speedup) if row.speedup else None,
        noise=(noise.low, noise.high) if noise else None,
        promised=before / after if before and after else None,
    )


def _chain(story: Story) -> str:
    assert story.parity is not None
    rows = [
        Bounded(
            label=f"{link.reference} → {link.candidate}",
            value=link.measures.relative_error,
            bound=link.tolerance.max_relative_error,
            status=link.status,
        )
        for link in story.parity.links
    ]
    return plots.bounded(rows, title="Error of each link", across="relative error of the logits")


def _gallery(title: str, note: str | None, figures: Mapping[str, tuple[str, str, str]], keys: tuple[str, ...]) -> str:
    chosen = [figures[key] for key in keys if key in figures]
    drawn = "".join(
        f"<figure><figcaption><h3>{escape(caption)}</h3><span>{escape(under)}</span></figcaption>{svg}</figure>"
        for caption, under, svg in chosen
    )
    quiet = f'<p class="quiet">{escape(note)}</p>' if note else ""
    return f'<section><h2>{escape(title)}</h2>{quiet}<div class="plots">{drawn}</div></section>' if drawn else ""


def _section(table: Table) -> str:
    numeric = [all(_is_number(row[i]) for row in table.rows) and i > 0 for i in range(len(table.columns))]
    head = "".join(
        f"<th{' class=number' if n else ''}>{escape(c)}</th>" for c, n in zip(table.columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(c, n) for c, n in zip(row, numeric, strict=True)) + "</tr>" for row in table.rows
    )
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    css = ' class="pairs"' if table.columns == ("Key", "Value") else ""
    return (
        f'<section id="{table.key}"><h2>{escape(table.title)}</h2>{note}'
        f'<div class="scroll"><table{css}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def _cell(words: str, numeric: bool) -> str:
    if words in TONES:
        return f'<td><span class="chip {TONES[words]}">{escape(words)}</span></td>'
    css = "number" if numeric else "words" if len(words) > 40 else ""
    return f'<td class="{css}">{escape(words)}</td>' if css else f"<td>{escape(words)}</td>"


def _is_number(words: str) -> bool:
    return words in ("", "–") or words[:1].isdigit() or words[:1] in "+-−"


def _commands(story: Story) -> str:
    lines = "\n".join(escape(line) for line in story.commands)
    return f"<section><h2>Commands</h2><pre>{lines}</pre></section>" if lines else ""


def _markdown_rows(table: Table) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(table.columns), "|" + "---|" * len(table.columns), *(line(row) for row in table.rows)]
