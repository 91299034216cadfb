"""The report of releases over time in Markdown: short tables for a pull request."""

from collections.abc import Iterator, Sequence

from ground.text import markdown_line

from .numbers import NOTHING, ReportTable
from .past_figures import Panel
from .past_releases import Change, Line, PastReleases
from .past_texts import (
    heading_text,
    in_line,
    moves_texts,
    release_text,
    releases_text,
    scalar_text,
    value_with_interval,
    verdict_of_newest,
)
from .render import markdown_from_table

SHOWN_RELEASES, SHOWN_DIFFERENCES, SHOWN_NOTES = 10, 8, 3


def markdown_from_past(past: PastReleases, title: str) -> str:
    """Return the verdicts, then the changes and the newest releases of each line, for a pull request."""
    lines = [f"# {markdown_line(title)}", ""]
    for verdict in (verdict_of_newest(past, line) for line in past.lines):
        lines += [f"**{markdown_line(verdict.headline)}.** {markdown_line(verdict.why)}", ""]
    for line in past.lines:
        lines += _lines_of(past, line)
    left_out = [f"{each.name}: {each.reason}" for each in past.left_out]
    return "\n".join([*lines, *_some(left_out, "record left out", "records left out")])


def _lines_of(past: PastReleases, line: Line) -> Iterator[str]:
    rows = [
        (
            release_text(line, change.first),
            "\n".join(moves_texts(change.moves)),
            "\n".join(_difference_texts(change)),
        )
        for change in reversed(line.changes)
    ]
    if rows:
        columns = ("Since release", "What changed", "What differs from the release before")
        title = in_line(past, line, "Changes")
        yield from markdown_from_table(ReportTable(key="changes", title=title, columns=columns, rows=tuple(rows)))
        yield ""
    yield from markdown_from_table(_newest_table(past, line))
    yield ""
    yield from (f"{markdown_line(note)}\n" for note in line.notes)
    yield from _some([f"{names} of {releases_text(line, places)}: {why}" for places, names, why in line.gaps], "gap")


def _some(notes: Sequence[str], one: str, several: str | None = None) -> list[str]:
    noun = one if len(notes) == 1 else several or f"{one}s"
    more = f"; and {len(notes) - SHOWN_NOTES} more" if len(notes) > SHOWN_NOTES else ""
    words = f"{len(notes)} {noun}: {'; '.join(notes[:SHOWN_NOTES])}{more}."
    return [f"{markdown_line(words)}\n"] if notes else []


def _difference_texts(change: Change) -> Iterator[str]:
    texts = [f"{key}: {scalar_text(before)} → {scalar_text(after)}" for key, before, after in change.differences]
    yield from texts[:SHOWN_DIFFERENCES] or ["nothing that is recorded"]
    if len(texts) > SHOWN_DIFFERENCES:
        yield f"and {len(texts) - SHOWN_DIFFERENCES} more"
    yield from change.uncompared


def _newest_table(past: PastReleases, line: Line) -> ReportTable:
    """Return the newest releases with figures of all batch sizes in a cell."""
    *timed, model = line.panels
    heads = list(dict.fromkeys((series.name, series.unit) for panel in timed for series in panel.series))

    def texts(panel: Panel, place: int) -> dict[str, str]:
        return {each.name: value_with_interval(each.values[place], each.unit, bounds=False) for each in panel.series}

    rows = []
    for place in reversed(range(max(0, len(line.releases) - SHOWN_RELEASES), len(line.releases))):
        release, cells = line.releases[place], [texts(panel, place) for panel in timed]
        by_batch = (" / ".join(each.get(name, NOTHING) for each in cells) for name, _ in heads)
        rows.append(
            (str(place + 1), release.label, release.bench.created[:10], *by_batch, *texts(model, place).values())
        )
    columns = ("", "Release", "Measured", *(heading_text(*head) for head in heads))
    columns = (*columns, *(series.name for series in model.series))
    title = "Releases" if len(rows) == len(line.releases) else f"Newest {len(rows)} of {len(line.releases)} releases"
    batches = " / ".join(str(panel.batch) for panel in timed)
    note = f"Batch {'sizes' if len(timed) > 1 else 'size'} {batches}." if timed else ""
    return ReportTable(key="newest", title=in_line(past, line, title), columns=columns, rows=tuple(rows), note=note)
