"""The report: HTML, Markdown, JUnit, CSV and plots from the records. It prints their verdicts and computes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

from .content import Content, story_from_record
from .figures import Figure, fidelity_figures, speed_figures
from .headline import lead, tiles, verdicts, where
from .long_csv import csv_from_story
from .numbers import NOTHING
from .shell import page
from .svg import standalone
from .tables import Table, tables

TONES = {"PASS": "pass", "FAIL": "fail"} | dict.fromkeys(
    ("INCONCLUSIVE", "NOT-COMPARABLE", "NOTED", "UNJUDGED"), "note"
)
# These tables stand side by side under the headline, and these stand under the plots of the same numbers.
BESIDE, SPEED, FIDELITY = (
    ("models", "effects", "ways"),
    ("latency", "end_to_end", "gate"),
    ("parity", "located", "structure"),
)


def html(record: Mapping[str, Any]) -> str:
    """One self-contained page; see story_from_record for the record's keys and what it raises."""
    story = story_from_record(record)
    made = tables(story)
    first = [_table(made[key]) for key in BESIDE if key in made]
    rest = [key for key in made if key not in (*BESIDE, *SPEED, *FIDELITY)]
    parts = [
        f"<h1>{escape(story.title)}</h1>",
        f'<p class="where">{escape(where(story))}</p>' if where(story) else "",
        _banner(story),
        _tiles(story),
        f'<div class="beside">{"".join(first)}</div>' if first else "",
        _section("Speed", _speed_notes(story), speed_figures(story), [made[key] for key in SPEED if key in made]),
        _section("Fidelity", [], fidelity_figures(story), [made[key] for key in FIDELITY if key in made]),
        *(_section(made[key].title, [], [], [made[key]]) for key in rest),
        _commands(story),
    ]
    return page(story.title, "\n".join(part for part in parts if part))


def markdown(record: Mapping[str, Any]) -> str:
    """The same tables for a pull request or a terminal."""
    story = story_from_record(record)
    lines = [f"# {story.title}", "", *(f"**{stated.words}** {stated.why}  " for stated in verdicts(story)), ""]
    lines += [lead(story), ""] if lead(story) else []
    for table in tables(story).values():
        lines += [f"## {table.title}", "", *_markdown_rows(table), ""]
        lines += [table.note, ""] if table.note else []
    if story.commands:
        lines += ["## Commands", "", "```", *story.commands, "```", ""]
    return "\n".join(lines)


def csv(record: Mapping[str, Any]) -> str:
    """Every number, unrounded, one a row, with its interval where it has one."""
    return csv_from_story(story_from_record(record))


def junit(record: Mapping[str, Any]) -> str:
    """Links, structural tests and gate rules as test cases: FAIL is a failure, what could not be judged is skipped."""
    story = story_from_record(record)
    suites = ElementTree.Element("testsuites", name=story.title)
    links, findings = (story.parity.links, story.parity.structure) if story.parity else ((), ())
    lines = {"parity": story.parity.line} if story.parity else {}
    cases = {
        "parity": [(link.name, link.status, link.reason) for link in links],
        "structure": [(f"{f.test} of {f.candidate}", f.status, f.reason) for f in findings],
        "gate": [(line.rule, line.verdict, line.message) for line in story.gate],
    }
    for suite, rows in cases.items():
        if rows:
            _suite(suites, suite, rows, lines.get(suite))
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def svgs(record: Mapping[str, Any]) -> dict[str, str]:
    """Every plot as a file of its own: name without suffix -> SVG text."""
    story = story_from_record(record)
    return {figure.key: standalone(figure.svg) for figure in (*speed_figures(story), *fidelity_figures(story))}


def _suite(parent: ElementTree.Element, name: str, rows: Sequence[tuple[str, str, str]], line: str | None) -> None:
    failures = sum(status == "FAIL" for _, status, _ in rows)
    skipped = sum(status not in ("PASS", "FAIL", "NOTED") for _, status, _ in rows)
    counts = {"tests": str(len(rows)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
    suite = ElementTree.SubElement(parent, "testsuite", {"name": name, **counts})
    if line is not None:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(properties, "property", {"name": "verdict", "value": line})
    for case, status, why in rows:
        element = ElementTree.SubElement(suite, "testcase", {"classname": name, "name": case})
        if status == "FAIL":
            ElementTree.SubElement(element, "failure", {"message": why})
        elif status not in ("PASS", "NOTED"):
            ElementTree.SubElement(element, "skipped", {"message": f"{status}: {why}"})
        else:
            ElementTree.SubElement(element, "system-out").text = why


def _banner(story: Content) -> str:
    found = verdicts(story)
    tones = [TONES.get(stated.verdict, "note") for stated in found]
    tone = next((t for t in ("fail", "note", "pass") if t in tones), "none")
    chips = [
        f'<span class="chip full {t}">{escape(stated.words)}</span>' for stated, t in zip(found, tones, strict=True)
    ]
    chips = chips or ['<span class="chip">No verdict: nothing was verified</span>']
    sentence = f'<p class="lead">{_unbroken(lead(story))}</p>' if lead(story) else ""
    whys = [f'<p class="why"><b>{escape(stated.words)}</b> {escape(stated.why)}</p>' for stated in found]
    return f'<div class="verdict {tone}"><p>{"".join(chips)}</p>{sentence}{"".join(whys)}</div>'


def _tiles(story: Content) -> str:
    items = [f"<li><b>{_unbroken(large)}</b><span>{escape(small)}</span></li>" for large, small in tiles(story)]
    return f'<ul class="tiles">{"".join(items)}</ul>' if items else ""


def _speed_notes(story: Content) -> list[tuple[str, str]]:
    """Remarks with their CSS class."""
    if story.summary is None:
        return []
    knee = story.summary.knee
    preferred = [(f"Preferred batch size {knee.batch}: {knee.reason}.", "")] if knee else []
    warnings = story.summary.warnings
    more = [(f"Mind: {len(warnings) - 3} more such remarks in the record", " note")] if len(warnings) > 3 else []
    return preferred + [(f"Mind: {warning}", " note") for warning in warnings[:3]] + more


def _section(title: str, notes: Sequence[tuple[str, str]], figures: Sequence[Figure], made: Sequence[Table]) -> str:
    """A heading, remarks, plots two by two, then tables; nothing when there is nothing under the heading."""
    if not figures and not made:
        return ""
    remarks = [f'<p class="quiet{css}">{escape(note)}</p>' for note, css in notes]
    drawn = [
        f"<figure><figcaption><h3>{escape(figure.title)}</h3><span>{escape(figure.under)}</span></figcaption>{figure.svg}</figure>"
        for figure in figures
    ]
    gallery = f'<div class="plots">{"".join(drawn)}</div>' if drawn else ""
    alone = not figures and len(made) == 1
    body = "".join(_table(table, titled=not alone) for table in made)
    return f"<section><h2>{escape(title)}</h2>{''.join(remarks)}{gallery}{body}</section>"


def _table(table: Table, *, titled: bool = True) -> str:
    numeric = [i > 0 and all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    head = "".join(f"<th{_css(n)}>{escape(c)}</th>" for c, n in zip(table.columns, numeric, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in table.rows)
    title = f"<h3>{escape(table.title)}</h3>" if titled else ""
    note = f'<p class="quiet">{escape(table.note)}</p>' if table.note else ""
    css = ' class="pairs"' if table.columns == ("Key", "Value") else ""
    grid = f'<div class="scroll"><table{css}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'<div class="table" id="{table.key}">{title}{grid}{note}</div>'


def _unbroken(words: str) -> str:
    return escape(words).replace(" %", "&nbsp;%")


def _cell(words: str, numeric: bool) -> str:
    if words in TONES:
        return f'<td><span class="chip {TONES[words]}">{escape(words)}</span></td>'
    large, _, small = words.partition("\n")
    under = f"<small>{escape(small)}</small>" if small else ""
    return f"<td{_css(numeric, wide=len(words) > 40)}>{escape(large)}{under}</td>"


def _css(numeric: bool, *, wide: bool = False) -> str:
    return ' class="number"' if numeric else ' class="words"' if wide else ""


def _is_number(words: str) -> bool:
    return words in ("", NOTHING) or words.startswith(("oom", "failed", "not finite", *"0123456789+−"))


def _commands(story: Content) -> str:
    lines = "\n".join(escape(line) for line in story.commands)
    return f"<section><h2>Commands</h2><pre>{lines}</pre></section>" if lines else ""


def _markdown_rows(table: Table) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        clean = (cell.replace("|", "\\|").replace("\n", " · ") for cell in cells)
        return f"| {' | '.join(clean)} |"

    return [line(table.columns), "|" + "---|" * len(table.columns), *(line(row) for row in table.rows)]
