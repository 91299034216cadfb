"""Plots of figures over releases."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from perf.stats.stats import Interval
from perf.stats.trend import Series

from .past_figures import BYTES, SHARE, SPEEDUP, name_at
from .past_releases import Move
from .past_texts import change_text, move_text
from .plots import BOTTOM, CURVE_HEIGHT, PlotSeries, draw_axes, ends_of, line_with_whiskers
from .svg import WIDTH, Drawing, group, line, linear_scale, text, width_of

HOW_TO_READ = "Figures with 95 % intervals over releases. A dashed line is where a level began, × a missing figure."
LEAST_SPAN_REL = 0.04  # of the axis, so that noise looks small
SHOWN = {SHARE: (100.0, "%"), BYTES: (1e-6, "MB"), SPEEDUP: (1.0, "times")}
"""The factor and the unit of figures that are not drawn in their own."""


def draw_over_releases(
    series: Series, moves: Sequence[Move], releases: Sequence[str], *, batch: int | None, tone: str
) -> Drawing:
    """Draw a figure with a labelled dashed line at the start of each level, and a gap without a figure."""
    name, (scale, unit) = name_at(series.name, batch), SHOWN.get(series.unit, (1.0, series.unit))
    known = {str(place + 1): _scaled(value, scale) for place, value in enumerate(series.values) if value is not None}
    drawn = PlotSeries(name=series.name, tone=tone, points=[*known.items()])
    top, ends = 46, ends_of([drawn])
    middle = (max(ends) + min(ends)) / 2 if ends else 0.0
    spread = [middle * (1 + side * LEAST_SPAN_REL / 2) for side in (-1, 1)] if ends else []
    y = linear_scale([*ends, *spread], start=BOTTOM, end=top, zero=False)
    numbers = [str(place + 1) for place in range(len(releases))]
    places, marks = draw_axes([drawn], numbers, y, unit=unit, x_label="release")
    end_of_last = 0.0
    for move in moves:
        first, label, of_move = move.point.first, change_text(move, bounds=False), "fail" if move.is_worse else "pass"
        between = (places[numbers[first - 1]] + places[numbers[first]]) / 2
        parts = [line(f"whisker {of_move} dash", (between, between), (top, BOTTOM))]
        start = min(between - width_of(label) / 2, WIDTH - 14 - width_of(label))
        if start >= end_of_last:
            parts.append(text(start, top - 4, label, css=of_move))
            end_of_last = start + width_of(label) + 4
        marks.append(group(f"release {numbers[first]} ({releases[first]}): {move_text(move)}", *parts))
    marks += [mark for part in _parts(drawn) for mark in line_with_whiskers(part, places, y, unit)]
    for number, release in zip(numbers, releases, strict=True):
        if number not in known:
            cross = text(places[number], BOTTOM - 4, "×", anchor="middle", css="note")
            marks.append(group(f"release {number}, {release}: no figure", cross))
    return Drawing(title=f"{name[:1].upper()}{name[1:]}", height=CURVE_HEIGHT, marks=tuple(marks))


def _scaled(value: Interval, scale: float) -> Interval:
    return Interval(value=scale * value.value, low=scale * value.low, high=scale * value.high)


def _parts(series: PlotSeries) -> Iterator[PlotSeries]:
    """Yield the runs of a series without a release that lacks a figure."""
    start = 0
    for end in range(1, len(series.points) + 1):
        if end == len(series.points) or int(series.points[end][0]) > int(series.points[end - 1][0]) + 1:
            yield replace(series, points=series.points[start:end])
            start = end
