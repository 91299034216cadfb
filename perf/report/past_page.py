"""The report of releases over time as one HTML page with plots and tables."""

from collections.abc import Iterator, Sequence

from perf.stats.releases import LeftOut
from perf.stats.trend import Series

from .numbers import NOTHING, ReportTable
from .page import Remark, Section, html_from_sections
from .past_figures import LEAST_STEP, Panel, name_at
from .past_plots import HOW_TO_READ, draw_over_releases
from .past_releases import Change, Line, Move, PastReleases
from .past_texts import (
    MEASURED,
    change_text,
    heading_text,
    in_line,
    release_text,
    releases_text,
    scalar_text,
    value_with_interval,
    verdict_of_newest,
)
from .svg import Figure


def html_from_past(past: PastReleases, title: str) -> str:
    """Return the page: the verdict, every change with what differs at it, plots, and tables of all figures."""
    sections = [section for line in past.lines for section in _sections_of(past, line)]
    left_out = _left_out_table(past.left_out)
    sections += [Section(title=left_out.title, tables=(left_out,))] if left_out.rows else []
    return html_from_sections(title, sections, verdicts=[verdict_of_newest(past, line) for line in past.lines])


def _sections_of(past: PastReleases, line: Line) -> Iterator[Section]:
    key = f"line-{past.lines.index(line) + 1}-"
    changed = [table for change in reversed(line.changes) for table in _change_tables(line, change, key)]
    rule = f"Each time, throughput and energy: {line.test}. Size and agreement: every step of {100 * LEAST_STEP:g} % "
    rule += "or more."
    words = (*(() if changed else ("No figure changed.",)), rule, *line.notes)
    remarks = tuple(Remark(text=text) for text in words)
    yield Section(title=in_line(past, line, "Changes"), remarks=remarks, tables=tuple(changed), is_paired=True)
    yield from (_panel_section(past, line, panel, key) for panel in line.panels)
    if line.gaps:
        rows = [(releases_text(line, places), names, why) for places, names, why in line.gaps]
        columns = ("Releases", "Figures", "Why they are missing")
        table = ReportTable(key=f"{key}missing", title="Missing figures", columns=columns, rows=tuple(rows))
        yield Section(title=in_line(past, line, table.title), tables=(table,))


def _change_tables(line: Line, change: Change, key: str) -> Iterator[ReportTable]:
    here, number = release_text(line, change.first), change.first + 1
    rows = [(move.name, _change_cell(move), _values_cell(move)) for move in change.moves]
    columns = ("Figure", "Change", "Before → after")
    yield ReportTable(key=f"{key}changed-{number}", title=f"Since {here}", columns=columns, rows=tuple(rows))
    lacking = f"Not compared: {'; '.join(change.uncompared)}." if change.uncompared else ""
    nothing = ("nothing that is recorded", NOTHING, NOTHING)
    yield ReportTable(
        key=f"{key}differs-{number}",
        title=f"What differs from {release_text(line, change.before)}",
        columns=("Key", "Before", "After"),
        rows=tuple((name, scalar_text(a), scalar_text(b)) for name, a, b in change.differences) or (nothing,),
        note=lacking,
        is_text=True,
    )


def _change_cell(move: Move) -> str:
    change, _, bounds = change_text(move).rstrip(")").partition(" (")
    return f"{change}, {'worse' if move.is_worse else 'better'}\n{bounds}"


def _values_cell(move: Move) -> str:
    unit = move.series.unit
    before, after = (value_with_interval(each, unit, bounds=False) for each in (move.before, move.after))
    return f"{before} → {after}" + (f"\n{unit}" if unit in MEASURED else "")


def _panel_section(past: PastReleases, line: Line, panel: Panel, key: str) -> Section:
    title = "Size and agreement" if panel.batch is None else f"Batch {panel.batch}"
    rows = [
        (
            f"{place + 1} ({release.label})\n{release.release.name}",
            *(value_with_interval(series.values[place], series.unit) for series in panel.series),
        )
        for place, release in reversed([*enumerate(line.releases)])
    ]
    table = ReportTable(
        key=key + ("model" if panel.batch is None else f"batch-{panel.batch}"),
        title="Figures of every release",
        columns=("Release", *(heading_text(series.name, series.unit) for series in panel.series)),
        rows=tuple(rows),
        is_folded=True,
    )
    figures = tuple(_figure(line, panel, series) for series in panel.series if any(series.values))
    remarks = (Remark(text=HOW_TO_READ),) if figures and panel is line.panels[0] else ()
    return Section(title=in_line(past, line, title), remarks=remarks, figures=figures, tables=(table,))


def _figure(line: Line, panel: Panel, series: Series) -> Figure:
    moves = [move for change in line.changes for move in change.moves if move.name == name_at(series.name, panel.batch)]
    releases, tone = [release.label for release in line.releases], "reduced" if series.judged else "dense"
    return Figure("", draw_over_releases(series, moves, releases, batch=panel.batch, tone=tone))


def _left_out_table(left_out: Sequence[LeftOut]) -> ReportTable:
    count = f"{len(left_out)} {'record' if len(left_out) == 1 else 'records'} left out"
    rows = tuple((each.name, each.reason) for each in left_out)
    return ReportTable(key="left-out", title=count, columns=("Record", "Why"), rows=rows)
