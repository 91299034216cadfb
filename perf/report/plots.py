"""Plots of a report, each WIDTH units wide."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ground.quantity import format_number
from perf.parity.link import Link
from perf.stats.stats import Interval, exact_interval

from .numbers import error_text as error_words
from .numbers import number_text
from .svg import (
    WIDTH,
    Drawing,
    Scale,
    axis_left,
    bar,
    cut_in_middle,
    dot,
    element,
    grid_x,
    grid_y,
    group,
    legend,
    line,
    linear_scale,
    logarithmic_scale,
    path,
    text,
    width_of,
)

HEAD, ROW_PX = 36, 38  # of figures with one row per batch, so that two of them line up
BOTTOM, CURVE_HEIGHT = 236, 280  # of figures with a horizontal axis of labels
LEAST_ERROR = 1e-9
LEAST_BOUNDED = 1e-8
HUES = 7  # in templates/plot.css
MOST_OF_NAMES = 0.45 * WIDTH
MEDIANS = "median, ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSeries:
    """Labelled values with intervals, equal bounds if none is known; `tone`, the colour, is dense or reduced."""

    name: str
    tone: str
    points: Sequence[tuple[str, Interval]]


def shown_interval(value: Interval) -> Interval:
    return value if value.is_bounded and value.low > 0 else exact_interval(value.value)


def draw_curve(series: Sequence[PlotSeries], *, title: str, unit: str, x_label: str, log: bool) -> Drawing:
    """Draw lines with intervals over evenly spaced labels, such as batch sizes, with a legend above."""
    labels = list(dict.fromkeys(label for s in series for label, _ in s.points))
    y = (logarithmic_scale if log else linear_scale)(ends_of(series), start=BOTTOM, end=34)
    places, marks = draw_axes(series, labels, y, unit=unit, x_label=x_label)
    marks += [mark for s in series for mark in line_with_whiskers(s, places, y, unit)]
    return Drawing(title=title, height=CURVE_HEIGHT, marks=tuple(marks))


def draw_axes(
    series: Sequence[PlotSeries], labels: Sequence[str], y: Scale, *, unit: str, x_label: str
) -> tuple[dict[str, float], list[Markup]]:
    """Return the x of each label, and the marks of both axes and of the legend above them."""
    left, right = axis_left(y.ticks), WIDTH - 14
    step = (right - left - 36) / max(len(labels) - 1, 1)
    places = {label: left + 18 + i * step for i, label in enumerate(labels)}
    if len(labels) == 1:
        places = {labels[0]: (left + right) / 2}
    marks = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series], right=unit)]
    every = math.ceil((max(map(width_of, labels), default=0) + 6) / step) if len(labels) > 1 else 1
    marks += [text(x, BOTTOM + 18, label, anchor="middle") for label, x in [*places.items()][::every]]
    return places, [*marks, text((left + right) / 2, BOTTOM + 36, x_label, anchor="middle")]


def ends_of(series: Sequence[PlotSeries]) -> list[float]:
    return [end for s in series for _, p in s.points for end in (p.low, p.value, p.high)]


def line_with_whiskers(series: PlotSeries, places: Mapping[str, float], y: Scale, unit: str) -> list[Markup]:
    """Return the marks of a series with its intervals; `places` has the x of each label."""
    path_data = " ".join(f"{places[label]:.1f},{y.at(p.value):.1f}" for label, p in series.points)
    marks = [element("polyline", class_=f"path {series.tone}", points=path_data)]
    for label, p in series.points:
        x, up, down = places[label], y.at(p.high), y.at(p.low)
        whisker = f"M{x - 4:.1f} {up:.1f}h8M{x:.1f} {up:.1f}V{down:.1f}M{x - 4:.1f} {down:.1f}h8"
        tip = f"{series.name}, {label}: {format_number(p.value, 4)} {unit}{_bounds(p, 4)}"
        marks.append(group(tip, path(f"whisker {series.tone}", whisker), dot(x, y.at(p.value), series.tone, 3.5)))
    return marks


def _bounds(value: Interval, digits: int) -> str:
    return (
        f" ({format_number(value.low, digits)} to {format_number(value.high, digits)})"
        if value.low < value.high
        else ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A point of a scatter plot; filled ones stand out."""

    x: float
    value: float
    filled: bool
    tip: str


def draw_scatter(clouds: Mapping[str, Sequence[Spot]], *, title: str, unit: str, x_label: str, least: float) -> Drawing:
    """Draw named clouds of spots on a logarithmic axis, with values below `least` at `least`."""
    right, top, bottom = WIDTH - 14, 46, 268
    spots = [spot for cloud in clouds.values() for spot in cloud]
    y = logarithmic_scale([spot.value for spot in spots], start=bottom, end=top, least=least)
    left = max(52.0, axis_left(y.ticks))
    x = linear_scale([spot.x for spot in spots], start=left, end=right, zero=False)
    tones = {name: f"hue{place % HUES}" for place, name in enumerate(clouds)}
    marks = [grid_y(y, left, right, unit), grid_x(x, top, bottom, x_label), legend(list(tones.items()), right=unit)]
    for name, cloud in clouds.items():
        for spot in cloud:
            css = tones[name] if spot.filled else f"{tones[name]} open"
            marks.append(group(spot.tip, dot(x.at(spot.x), y.at(max(spot.value, least)), css, 4.5)))
    return Drawing(title=title, height=bottom + 52, marks=tuple(marks))


def _beside_rows(rows: Iterable[str]) -> float:
    return max([58.0, *(8 + width_of(name) for name in rows)])


def draw_distributions(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> Drawing:
    """Draw the densities of both subjects' times over the reference's median, in a row per batch.

    `rows` has the samples in ms by batch and subject, the reference first. Medians are at the right. Times beyond three
    interquartile ranges count at the border.
    """
    shown = {
        label: " → ".join(number_text(float(np.median(each))) for each in sides.values())
        for label, sides in rows.items()
    }
    left, right = _beside_rows(rows), WIDTH - max([92.0, *(8 + width_of(words) for words in shown.values())])
    bottom = HEAD + len(rows) * ROW_PX
    relative = {label: _relative(by_name) for label, by_name in rows.items()}
    ends = [end for times_of in relative.values() for times in times_of.values() for end in _without_outliers(times)]
    x = linear_scale(ends, start=left, end=right, zero=False)
    names = list(dict.fromkeys(name for by_name in rows.values() for name in by_name))
    tones = dict(zip(names, ("dense", "reduced"), strict=False))
    marks = [grid_x(x, HEAD, bottom, f"time / median of {names[0]}"), legend(list(tones.items()), right=MEDIANS)]
    marks += [text(WIDTH - 2, 13, MEDIANS, anchor="end")]
    for place, (label, by_name) in enumerate(rows.items()):
        base = HEAD + (place + 1) * ROW_PX - 3
        marks.append(text(2, base - 9, label, css="name"))
        marks.append(text(WIDTH - 2, base - 9, shown[label], anchor="end", css="name"))
        for name, samples in by_name.items():
            tip = f"{label}, {name}: median {format_number(float(np.median(samples)), 4)} ms, {len(samples)} samples, "
            tip += f"up to {format_number(max(samples), 4)} ms"
            marks.append(group(tip, *_density(relative[label][name], tones[name], x, base)))
    return Drawing(title="Distribution of samples", height=bottom + 42, marks=tuple(marks))


def _without_outliers(times: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(times, [0.25, 0.75])
    reach = 3 * (high - low)
    return float(max(times.min(), low - reach)), float(min(times.max(), high + reach))


def _relative(by_name: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    reference = float(np.median(next(iter(by_name.values()))))
    return {name: np.asarray(times, dtype=np.float64) / reference for name, times in by_name.items()}


def _density(times: NDArray[np.float64], tone: str, x: Scale, base: float) -> tuple[Markup, Markup]:
    """Return a smoothed histogram of 80 bins and a line at the median."""
    edges = np.linspace(x.low, x.high, 81)
    counts, _ = np.histogram(np.clip(times, x.low, x.high), bins=edges)
    smooth = np.convolve(np.pad(counts, 2), [1, 2, 3, 2, 1], mode="same")[2:-2]
    tall = smooth / max(float(smooth.max()), 1.0) * (ROW_PX - 10)
    centres = (edges[:-1] + edges[1:]) / 2
    top = "".join(f"L{x.at(float(c)):.1f} {base - h:.1f}" for c, h in zip(centres, tall, strict=True))
    at = x.at(float(np.median(times)))
    area = path(f"area {tone}", f"M{x.start:.1f} {base:.1f}{top}L{x.end:.1f} {base:.1f}Z")
    return area, line(f"whisker {tone}", (at, at), (base - ROW_PX + 10, base))


def draw_gains(rows: Mapping[str, tuple[Interval | None, Interval | None]], promised: float | None) -> Drawing:
    """Draw a row per batch with the speed-up, the A/A noise as a band around 1, and the ratio of MACs."""
    bottom = HEAD + len(rows) * ROW_PX
    ends = [end for pair in rows.values() for each in pair if each for end in (each.low, each.value, each.high)]
    x = linear_scale([1.0, *ends, promised or 1.0], start=_beside_rows(rows), end=WIDTH - 50, zero=False)
    marks = [grid_x(x, HEAD, bottom, "dense time / reduced time")]
    marks.append(legend([("dense against itself", "band"), ("reduced", "reduced")]))
    if promised:
        marks.append(text(WIDTH - 2, 13, "┆ promised by MACs", anchor="end"))
    marks.append(line("bound", (x.at(1), x.at(1)), (HEAD, bottom)))
    for place, (label, (ratio, noise)) in enumerate(rows.items()):
        y = HEAD + (place + 0.5) * ROW_PX
        marks.append(text(2, y + 4, label, css="name"))
        if noise is not None:
            low, high = x.at(noise.low), x.at(noise.high)
            tip = f"{label}: dense against itself {noise.low:.3f} to {noise.high:.3f}"
            marks.append(group(tip, bar("band", (low, max(high, low + 1.5)), (y - 11, y + 11), 3)))
        if promised is not None:
            tick = line("whisker dense dash", (x.at(promised), x.at(promised)), (y - 12, y + 12))
            marks.append(group(f"MAC ratio: {promised:.2f}x", tick))
        marks += [text(x.end + 6, y + 4, "no run", css="note")] if ratio is None else _ratio(label, ratio, x, y)
    return Drawing(title="Speed-up beside noise and promise", height=bottom + 42, marks=tuple(marks))


def _ratio(label: str, ratio: Interval, x: Scale, y: float) -> list[Markup]:
    low, mid, high = x.at(ratio.low), x.at(ratio.value), x.at(ratio.high)
    tip = f"{label}: {ratio.value:.3f}x{_bounds(ratio, 4)}"
    whisker = f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"
    mark = group(tip, path("whisker reduced", whisker), dot(mid, y, "reduced", 3.5))
    return [mark, text(WIDTH - 2, y + 4, f"{ratio.value:.2f}×", anchor="end", css="name")]


def draw_sites(rows: Mapping[str, tuple[float, float]]) -> Drawing:
    """Draw a row per site on a logarithmic axis with its error before (ring) and after compensation (dot)."""
    row_px = 22 if len(rows) <= 16 else 17
    left = 14 + min(max((width_of(name) for name in rows), default=0), MOST_OF_NAMES)
    right, head = WIDTH - 16, 36
    bottom = head + len(rows) * row_px
    x = logarithmic_scale([v for pair in rows.values() for v in pair], start=left, end=right, least=LEAST_ERROR)
    marks = [
        grid_x(x, head, bottom, "relative error"),
        legend([("uncompensated", "dense"), ("compensated", "reduced")]),
    ]
    for i, (name, (before, after)) in enumerate(rows.items()):
        y, ends = head + (i + 0.5) * row_px, [x.at(max(value, LEAST_ERROR)) for value in (before, after)]
        label = text(left - 10, y + 4, cut_in_middle(name, left - 14), anchor="end", css="name")
        between = line("whisker reduced", (ends[0], ends[1]), (y, y))
        rings = dot(ends[0], y, "dense open"), dot(ends[1], y, "reduced")
        marks.append(group(f"{name}: {before:.3g} before, {after:.3g} after", label, between, *rings))
    return Drawing(title="Error of each site", height=bottom + 42, marks=tuple(marks))


def draw_links(links: Sequence[Link], *, x_label: str) -> Drawing:
    """Draw a row per link on a logarithmic axis with a bar up to its bound, and its error as a dot."""
    left, right, head = 8, WIDTH - 8, 6
    bottom = head + len(links) * 46
    pairs = [(link.measures.relative_error, link.tolerance.max_relative_error) for link in links]
    values = [end for error, bound in pairs for end in (error, bound or error) if math.isfinite(end)]
    x = logarithmic_scale([*values, LEAST_BOUNDED, 1e-1], start=left, end=right, least=LEAST_BOUNDED)
    rows = (_bounded(link, x, head + i * 46 + 32) for i, link in enumerate(links))
    return Drawing(title="Error of each link", height=bottom + 42, marks=(grid_x(x, head, bottom, x_label), *rows))


def _bounded(link: Link, x: Scale, y: float) -> Markup:
    error, bound = link.measures.relative_error, link.tolerance.max_relative_error
    tone = {"PASS": "pass", "FAIL": "fail"}.get(link.status, "dense")
    value = error_words(error)
    words = f"{value} no limit" if bound is None else f"{value} of {error_words(bound)}"
    room = []
    if bound is not None:
        end = x.at(max(bound, LEAST_BOUNDED))
        room = [bar("room", (x.start, end), (y - 6, y + 6), 2), line("bound", (end, end), (y - 8, y + 8))]
    track = line("track", (x.start, x.end), (y, y))
    short_name = cut_in_middle(link.name, x.end - x.start - width_of(words) - 12)
    name, figure = text(x.start, y - 13, short_name, css="name"), text(x.end, y - 13, words, anchor="end")
    mark = dot(x.at(max(error, LEAST_BOUNDED)), y, tone, 5)
    return group(f"{link.name}: {words}", *room, track, name, figure, mark)
