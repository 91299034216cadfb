"""Latency over releases in a report: plots, a table and what was left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from perf.stats.changes import ChangePoint
from perf.stats.stats import Interval
from perf.stats.trend import BatchTrend, Trend

from .numbers import Table
from .plots import Point, Series, line_with_whiskers
from .svg import WIDTH, Drawing, Figure, grid_y, group, legend, line, linear, text

MOST_LABELS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The place where a level began, in words; `tone` is fail, pass or note."""

    place: int
    tone: str
    tip: str


def trend(series: Sequence[Series], marks: Sequence[Mark], count: int, *, title: str, unit: str) -> Drawing:
    """Series over `count` releases, whose points are labelled from "1" on; every few of them have their label."""
    left, right, top, bottom = 52, WIDTH - 14, 34, 236
    values = [v for s in series for p in s.points for v in (p.low, p.value, p.high)]
    y = linear(values, start=bottom, end=top, zero=False)
    step = (right - left - 24) / max(count - 1, 1)
    places = {str(i + 1): left + 12 + i * step if count > 1 else (left + right) / 2 for i in range(count)}
    every = -(-count // MOST_LABELS)
    drawn: list[Markup] = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series])]
    drawn += [text(places[str(i + 1)], bottom + 18, str(i + 1), anchor="middle") for i in range(0, count, every)]
    drawn.append(text((left + right) / 2, bottom + 36, "release", anchor="middle"))
    for mark in marks:
        between = places[str(mark.place + 1)] - min(step, right - left) / 2
        drawn.append(group(mark.tip, line(f"whisker {mark.tone} dash", (between, between), (top, bottom))))
    drawn += [each for s in series for each in line_with_whiskers(s, places, y, unit)]
    return Drawing(title=title, height=280, marks=tuple(drawn))


TONES = ("dense", "reduced")


def history_figures(history: Trend | None) -> list[Figure]:
    """Of each batch size the median times, and the speed-up where there is one."""
    if history is None:
        return []
    figures = [figure for batch in history.batches for figure in _figures(batch, history)]
    return [Figure(caption=caption, drawing=drawing) for caption, drawing in figures]


def trend_drawing(history: Trend) -> Drawing:
    """The plot of what is judged at the first batch size that has a figure; an empty one where none has."""
    for batch in history.batches:
        if any(batch.judged.values):
            drawn = [drawing for _, drawing in _figures(batch, history)]
            return drawn[-1 if batch.judged.unit == "x" else 0]
    return trend([], [], len(history.releases), title="Latency over releases", unit="ms")


def history_table(history: Trend | None) -> Table:
    """A row for each batch size and release: medians, speed-up and whether a level began there."""
    batches = history.batches if history else ()
    names = [series.name for series in batches[0].series] if batches else []
    rows = [row for batch in batches for row in _rows(batch, history.releases if history else ())]
    left_out = [f"{each.name} ({each.reason})" for each in history.left_out] if history else []
    note = f"{history.test}." if history else ""
    note += f" Left out: {'; '.join(left_out)}." if left_out else ""
    columns = ("Batch", "Release", "Measured", *names, "Time")
    return Table(key="history", title="Latency over releases", columns=columns, rows=tuple(rows), note=note)


def _figures(batch: BatchTrend, history: Trend) -> list[tuple[str, Drawing]]:
    times = [
        Series(name=series.name, tone=tone, points=_points(series.values))
        for tone, series in zip(TONES, batch.series[:2], strict=True)
        if any(series.values)
    ]
    faster = Series(name=batch.series[2].name, tone="reduced", points=_points(batch.series[2].values))
    marks = [_mark(change, history) for change in batch.judged.changes]
    count, figures = len(history.releases), []
    if times:
        title = f"Median time by release, batch {batch.batch}"
        figures.append((_caption(batch, "ms"), trend(times, marks, count, title=title, unit="ms")))
    if faster.points:
        title = f"Speed-up by release, batch {batch.batch}"
        figures.append((_caption(batch, "x"), trend([faster], marks, count, title=title, unit="times")))
    return figures


def _caption(batch: BatchTrend, unit: str) -> str:
    shown = "Median times" if unit == "ms" else "Ratio of medians"
    judged = (
        " changes are looked for here" if batch.judged.unit == unit else " changes are looked for in the other plot"
    )
    return f"{shown} at batch {batch.batch} with 95 % intervals;{judged}, a dashed line where a level began."


def _points(values: Sequence[Interval | None]) -> tuple[Point, ...]:
    return tuple(
        Point(label=str(place + 1), value=value.value, low=value.low, high=value.high)
        for place, value in enumerate(values)
        if value is not None
    )


def _mark(change: ChangePoint, history: Trend) -> Mark:
    percent = 100 * (change.ratio.value - 1)
    tip = f"release {change.first + 1}, {history.releases[change.first]}: time {percent:+.1f} %"
    return Mark(place=change.first, tone="fail" if change.is_rise else "pass", tip=tip)


def _rows(batch: BatchTrend, releases: Sequence[str]) -> list[tuple[str, ...]]:
    changes = {change.first: change for change in batch.judged.changes}
    rows = []
    for place, name in enumerate(releases):
        cells = [_cell(series.values[place], series.unit) for series in batch.series]
        change = changes.get(place)
        moved = "" if change is None else f"{100 * (change.ratio.value - 1):+.1f} %"
        rows.append((str(batch.batch), str(place + 1), name, *cells, moved))
    return rows


def _cell(value: Interval | None, unit: str) -> str:
    if value is None:
        return "-"
    return value.describe(".4g", bounds=unit.replace("ms", " ms") + " ({} to {})")
