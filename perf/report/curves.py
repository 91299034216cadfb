"""Figures and tables of errors over the number of calibration images, and of latency over releases."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ground.quantity import format_number
from perf.stats.changes import ChangePoint
from perf.stats.stats import UNBOUNDED, Interval, exact_interval
from perf.stats.trend import BatchTrend, Trend

from .numbers import ReportTable
from .plots import PlotSeries, draw_curve, ends_of, line_with_whiskers
from .svg import WIDTH, Drawing, Figure, axis_left, grid_y, group, legend, line, linear_scale, text


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
        return "-" if value is None else format(value, form)

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


def draw_trend(
    series: Sequence[PlotSeries], changes: Sequence[ChangePoint], releases: Sequence[str], *, title: str, unit: str
) -> Drawing:
    """Draw series over releases, with a dashed line at the start of each level."""
    count = len(releases)
    right, top, bottom = WIDTH - 14, 34, 236
    y = linear_scale(ends_of(series), start=bottom, end=top, zero=False)
    left = max(52.0, axis_left(y.ticks))
    step = (right - left - 24) / max(count - 1, 1)
    places = {str(i + 1): left + 12 + i * step if count > 1 else (left + right) / 2 for i in range(count)}
    every = -(-count // MOST_LABELS)
    drawn: list[Markup] = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series], right=unit)]
    drawn += [text(places[str(i + 1)], bottom + 18, str(i + 1), anchor="middle") for i in range(0, count, every)]
    drawn.append(text((left + right) / 2, bottom + 36, "release", anchor="middle"))
    for change in changes:
        between = places[str(change.first + 1)] - min(step, right - left) / 2
        tip = f"release {change.first + 1}, {releases[change.first]}: time {100 * (change.ratio.value - 1):+.1f} %"
        tone = "fail" if change.is_rise else "pass"
        drawn.append(group(tip, line(f"whisker {tone} dash", (between, between), (top, bottom))))
    drawn += [each for s in series for each in line_with_whiskers(s, places, y, unit)]
    return Drawing(title=title, height=280, marks=tuple(drawn))


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
    return ReportTable(key="history", title="Latency over releases", columns=columns, rows=tuple(rows), note=note)


def _figures(batch: BatchTrend, history: Trend) -> list[Figure]:
    *times, faster = (
        PlotSeries(name=series.name, tone=tone, points=_points(series.values))
        for tone, series in zip(TONES, batch.series, strict=True)
    )
    changes, judged = batch.judged.changes, batch.judged.unit
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


def _points(values: Sequence[Interval | None]) -> list[tuple[str, Interval]]:
    return [(str(place + 1), value) for place, value in enumerate(values) if value is not None]


def _rows(batch: BatchTrend, releases: Sequence[str]) -> Iterator[tuple[str, ...]]:
    moved = {change.first: f"{100 * (change.ratio.value - 1):+.1f} %" for change in batch.judged.changes}
    for place, name in enumerate(releases):
        cells = [_cell(series.values[place], series.unit) for series in batch.series]
        yield (str(batch.batch), str(place + 1), name, *cells, moved.get(place, ""))


def _cell(value: Interval | None, unit: str) -> str:
    if value is None:
        return "-"
    bounds = (
        f" ({format_number(value.low, 4)} to {format_number(value.high, 4)})" if value.is_bounded else f" ({UNBOUNDED})"
    )
    return f"{format_number(value.value, 4)}{unit.replace('ms', ' ms')}{bounds}"
