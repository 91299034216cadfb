"""Figures and tables of errors over the number of calibration images, and of latency over releases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from ground.quantity import format_number
from perf.stats.changes import ChangePoint
from perf.stats.stats import UNBOUNDED, Interval, exact_interval
from perf.stats.trend import BatchTrend, Trend

from .numbers import NOTHING, ReportTable, signed_percent
from .plots import PlotSeries, draw_curve, ends_of, line_with_whiskers
from .svg import WIDTH, Drawing, Figure, axis_left, grid_y, group, legend, line, linear_scale, text, width_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesPoint:
    """Figures of the model reduced from the moments of a number of images.

    `fitted` and `held_out` are losses summed over sites, as shares of the dense variance. `over_largest` is the error
    divided by that with the most images, with 95 % bounds over the judged inputs.
    """

    images: int
    fitted: float
    held_out: float | None
    relative_error: float | None
    agreement: float | None
    over_largest: float
    low: float
    high: float


def draw_calibration_sizes(points: Sequence[ImagesPoint]) -> Drawing:
    """Draw losses on fitted and held-out images, or the output's error if there are no held-out images."""

    def series(name: str, tone: str, values: Sequence[float]) -> PlotSeries:
        labelled = zip(points, values, strict=True)
        return PlotSeries(
            name=name, tone=tone, points=[(f"{at.images:,}", exact_interval(value)) for at, value in labelled]
        )

    others = [at.held_out for at in points if at.held_out is not None]
    errors = [at.relative_error for at in points if at.relative_error is not None]
    if others:
        fitted = series("images of the fit", "dense", [at.fitted for at in points])
        lines = [fitted, series("others", "reduced", others)]
        title, unit = "Share of variance lost, summed over sites, against calibration images", "loss"
    else:
        lines = [series("output", "reduced", errors)]
        title, unit = "Relative error of the output against calibration images", "error"
    positive = all(point.value > 0.0 for each in lines for _, point in each.points)
    return draw_curve(lines, title=title, unit=unit, x_label="calibration images", log=positive)


def images_figure(points: Sequence[ImagesPoint]) -> Figure:
    return Figure("Where the lines meet, more images of the same kind bring nothing.", draw_calibration_sizes(points))


def images_table(points: Sequence[ImagesPoint], *, sentence: str) -> ReportTable:

    def shown(value: float | None, form: str) -> str:
        return NOTHING if value is None else format(value, form)

    rows = tuple(
        (
            f"{at.images:,}",
            f"{at.fitted:.4g}",
            shown(at.held_out, ".4g"),
            shown(at.relative_error, ".4f"),
            shown(at.agreement, ".2%"),
            f"{at.over_largest:.3f} ({at.low:.3f} to {at.high:.3f})",
        )
        for at in points
    )
    columns = ("Images", "Loss, fitted", "Loss, held out", "Output error", "Agreement", "Over the largest")
    return ReportTable(key="calibration-size", title="Calibration images", columns=columns, rows=rows, note=sentence)


MOST_LABELS = 10
LEAST_SPAN_REL = 0.04  # of the axis, so that noise looks small


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """The release, from 0, at which a level begins; `tone` is pass, fail or note."""

    first: int
    label: str
    tip: str
    tone: str


def draw_trend(
    series: Sequence[PlotSeries], onsets: Sequence[Onset], releases: Sequence[str], *, title: str, unit: str
) -> Drawing:
    """Draw series over releases, with a labelled dashed line at the start of each level, and a gap without a figure."""
    count = len(releases)
    right, top, bottom = WIDTH - 14, 46, 236
    ends = ends_of(series)
    middle = (max(ends) + min(ends)) / 2 if ends else 0.0
    spread = [middle * (1 + side * LEAST_SPAN_REL / 2) for side in (-1, 1)] if ends else []
    y = linear_scale([*ends, *spread], start=bottom, end=top, zero=False)
    left = max(52.0, axis_left(y.ticks))
    step = (right - left - 24) / max(count - 1, 1)
    places = {str(i + 1): left + 12 + i * step if count > 1 else (left + right) / 2 for i in range(count)}
    every = -(-count // MOST_LABELS)
    drawn: list[Markup] = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series], right=unit)]
    drawn += [text(places[str(i + 1)], bottom + 18, str(i + 1), anchor="middle") for i in range(0, count, every)]
    drawn.append(text((left + right) / 2, bottom + 36, "release", anchor="middle"))
    end_of_last = left
    for onset in onsets:
        between = places[str(onset.first + 1)] - min(step, right - left) / 2
        marks = [line(f"whisker {onset.tone} dash", (between, between), (top, bottom))]
        start = min(between - width_of(onset.label) / 2, right - width_of(onset.label))
        if start >= end_of_last:
            marks.append(text(start, top - 4, onset.label, css=onset.tone))
            end_of_last = start + width_of(onset.label) + 4
        drawn.append(group(onset.tip, *marks))
    drawn += [each for s in series for part in _parts(s) for each in line_with_whiskers(part, places, y, unit)]
    known = {label for s in series for label, _ in s.points}
    drawn += [
        group(f"release {label}, {name}: no figure", text(places[label], bottom - 4, "×", anchor="middle", css="note"))
        for label, name in zip(places, releases, strict=True)
        if label not in known
    ]
    return Drawing(title=title, height=280, marks=tuple(drawn))


def _parts(series: PlotSeries) -> Iterator[PlotSeries]:
    """Yield the runs of a series without a release that lacks a figure."""
    start = 0
    for end in range(1, len(series.points) + 1):
        if end == len(series.points) or int(series.points[end][0]) > int(series.points[end - 1][0]) + 1:
            yield replace(series, points=series.points[start:end])
            start = end


TONES = ("dense", "reduced", "reduced")


def history_figures(history: Trend) -> list[Figure]:
    return [figure for batch in history.batches for figure in _figures(batch, history)]


def draw_history(history: Trend) -> Drawing:
    """Draw the judged series at the first batch size that has a figure."""
    for batch in history.batches:
        if any(batch.judged.values):
            return _figures(batch, history)[-1 if batch.judged.unit == "x" else 0].drawing
    return draw_trend([], [], history.releases, title="Latency over releases", unit="ms")


def history_table(history: Trend) -> ReportTable:
    names = [series.name for batch in history.batches[:1] for series in batch.series]
    rows = [row for batch in history.batches for row in _rows(batch, history.releases)]
    left_out = [f"{each.name} ({each.reason})" for each in history.left_out]
    note = f"{history.test}." + (f" Left out: {'; '.join(left_out)}." if left_out else "")
    columns = ("Batch", "Release", "Measured", *names, "Time")
    return ReportTable(
        key="history", title="Latency over releases", columns=columns, rows=tuple(rows), note=note, is_folded=True
    )


def _figures(batch: BatchTrend, history: Trend) -> list[Figure]:
    *times, faster = (
        PlotSeries(name=series.name, tone=tone, points=points_by_release(series.values))
        for tone, series in zip(TONES, batch.series, strict=True)
    )
    changes, judged = _onsets(batch.judged.changes, history.releases), batch.judged.unit
    figures = []
    for what, shown, unit, series in (
        ("Median time", "Median times", "ms", [each for each in times if each.points]),
        ("Speed-up", "Ratio of medians", "times", [faster] if faster.points else []),
    ):
        if series:
            here = "here" if (judged == "ms") == (unit == "ms") else "in the other plot"
            caption = f"{shown} at batch {batch.batch} with 95 % intervals; changes are looked for {here}, "
            caption += "a dashed line where a level began."
            title = f"{what} by release, batch {batch.batch}"
            figures.append(Figure(caption, draw_trend(series, changes, history.releases, title=title, unit=unit)))
    return figures


def _onsets(changes: Sequence[ChangePoint], releases: Sequence[str]) -> list[Onset]:
    onsets = []
    for change in changes:
        label, tone = signed_percent(change.ratio.value - 1), "fail" if change.is_rise else "pass"
        tip = f"release {change.first + 1}, {releases[change.first]}: time {label}"
        onsets.append(Onset(first=change.first, label=label, tip=tip, tone=tone))
    return onsets


def points_by_release(values: Sequence[Interval | None]) -> list[tuple[str, Interval]]:
    return [(str(place + 1), value) for place, value in enumerate(values) if value is not None]


def _rows(batch: BatchTrend, releases: Sequence[str]) -> Iterator[tuple[str, ...]]:
    moved = {change.first: f"{100 * (change.ratio.value - 1):+.1f} %" for change in batch.judged.changes}
    for place, name in enumerate(releases):
        cells = [_cell(series.values[place], series.unit) for series in batch.series]
        yield (str(batch.batch), str(place + 1), name, *cells, moved.get(place, ""))


def _cell(value: Interval | None, unit: str) -> str:
    if value is None:
        return NOTHING
    bounds = (
        f" ({format_number(value.low, 4)} to {format_number(value.high, 4)})" if value.is_bounded else f" ({UNBOUNDED})"
    )
    return f"{format_number(value.value, 4)}{unit.replace('ms', ' ms')}{bounds}"
