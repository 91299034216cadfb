"""The kinds of plots, each from values to a drawing of WIDTH units."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from .svg import (
    WIDTH,
    Drawing,
    Scale,
    bar,
    dot,
    element,
    grid_x,
    grid_y,
    group,
    legend,
    line,
    linear,
    logarithmic,
    path,
    text,
)

HEAD, ROW_PX = 36, 38  # of figures with one row a batch, so that two of them line up
LEAST_ERROR = 1e-9
HUES = 7  # as many as templates/plot.css has


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value at a labelled place, with its interval (equal bounds: none known)."""

    label: str
    value: float
    low: float
    high: float

    def ends(self, form: str) -> str:
        """The interval in words behind the value."""
        return f" ({self.low:{form}} to {self.high:{form}})" if self.low < self.high else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one colour; `tone` is dense or reduced."""

    name: str
    tone: str
    points: tuple[Point, ...]


def curve(series: Sequence[Series], *, title: str, unit: str, x_label: str, log: bool) -> Drawing:
    """Lines with intervals over evenly spaced labels (batch sizes), the legend above."""
    labels = list(dict.fromkeys(p.label for s in series for p in s.points))
    left, right, top, bottom = 46, WIDTH - 14, 34, 236
    values = [v for s in series for p in s.points for v in (p.low, p.value, p.high)]
    y = (logarithmic if log else linear)(values, start=bottom, end=top)
    step = (right - left - 36) / max(len(labels) - 1, 1)
    places = {label: left + 18 + i * step for i, label in enumerate(labels)}
    if len(labels) == 1:
        places = {labels[0]: (left + right) / 2}
    marks = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series])]
    marks += [text(x, bottom + 18, label, anchor="middle") for label, x in places.items()]
    marks += [text((left + right) / 2, bottom + 36, x_label, anchor="middle")]
    marks += [mark for s in series for mark in line_with_whiskers(s, places, y, unit)]
    return Drawing(title=title, height=280, marks=tuple(marks))


def line_with_whiskers(series: Series, places: Mapping[str, float], y: Scale, unit: str) -> list[Markup]:
    """A line through the points of a series, each with its interval; `places` says where each label is."""
    path_data = " ".join(f"{places[p.label]:.1f},{y.at(p.value):.1f}" for p in series.points)
    marks = [element("polyline", class_=f"path {series.tone}", points=path_data)]
    for p in series.points:
        x, up, down = places[p.label], y.at(p.high), y.at(p.low)
        whisker = f"M{x - 4:.1f} {up:.1f}h8M{x:.1f} {up:.1f}V{down:.1f}M{x - 4:.1f} {down:.1f}h8"
        tip = f"{series.name}, {p.label}: {p.value:.4g} {unit}{p.ends('.4g')}"
        marks.append(group(tip, path(f"whisker {series.tone}", whisker), dot(x, y.at(p.value), series.tone, 3.5)))
    return marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A value over another; the filled ones stand out."""

    x: float
    value: float
    filled: bool
    tip: str


def scatter(clouds: Mapping[str, Sequence[Spot]], *, title: str, unit: str, x_label: str, least: float) -> Drawing:
    """Spots by the name of their cloud, each in its colour, on a logarithmic axis; below `least` is at `least`."""
    left, right, top, bottom = 52, WIDTH - 14, 46, 268
    spots = [spot for cloud in clouds.values() for spot in cloud]
    x = linear([spot.x for spot in spots], start=left, end=right, zero=False)
    y = logarithmic([spot.value for spot in spots], start=bottom, end=top, least=least)
    tones = {name: f"hue{place % HUES}" for place, name in enumerate(clouds)}
    marks = [grid_y(y, left, right, unit), grid_x(x, top, bottom, x_label), legend(list(tones.items()))]
    for name, cloud in clouds.items():
        for spot in cloud:
            css = tones[name] if spot.filled else f"{tones[name]} open"
            marks.append(group(spot.tip, dot(x.at(spot.x), y.at(max(spot.value, least)), css, 4.5)))
    return Drawing(title=title, height=bottom + 52, marks=tuple(marks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of both subjects at one batch size, in milliseconds, by name; the first name is the reference."""

    label: str
    by_name: Mapping[str, Sequence[float]]


def distributions(rows: Sequence[Samples], *, title: str, x_label: str) -> Drawing:
    """One row a batch: densities of both subjects' times relative to the reference's median, with medians marked.

    Relative times put all batches on one axis; the medians in milliseconds stand at the right. Times further out than
    three interquartile ranges count at the border, so that one interrupted call doesn't flatten the rest.
    """
    left, right = 58, WIDTH - 92
    bottom = HEAD + len(rows) * ROW_PX
    relative = [_relative(row) for row in rows]
    ends = [end for row in relative for times in row.values() for end in _without_outliers(times)]
    x = linear(ends, start=left, end=right, zero=False)
    names = list(dict.fromkeys(name for row in rows for name in row.by_name))
    tones = dict(zip(names, ("dense", "reduced"), strict=False))
    marks = [grid_x(x, HEAD, bottom, x_label), legend(list(tones.items()))]
    marks += [text(WIDTH - 2, 13, "median, ms", anchor="end")]
    for place, (row, times) in enumerate(zip(rows, relative, strict=True)):
        base = HEAD + (place + 1) * ROW_PX - 3
        medians = " → ".join(f"{np.median(samples):#.3g}".rstrip(".") for samples in row.by_name.values())
        marks += [
            text(2, base - 9, row.label, css="name"),
            text(WIDTH - 2, base - 9, medians, anchor="end", css="name"),
        ]
        marks += [_density(row, name, times[name], tones[name], x, base) for name in row.by_name]
    return Drawing(title=title, height=bottom + 42, marks=tuple(marks))


def _without_outliers(times: NDArray[np.float64]) -> tuple[float, float]:
    """The range of the samples, cut three interquartile ranges beyond the quartiles."""
    low, high = np.quantile(times, [0.25, 0.75])
    reach = 3 * (high - low)
    return float(max(times.min(), low - reach)), float(min(times.max(), high + reach))


def _relative(row: Samples) -> dict[str, NDArray[np.float64]]:
    reference = float(np.median(next(iter(row.by_name.values()))))
    return {name: np.asarray(times, dtype=np.float64) / reference for name, times in row.by_name.items()}


def _density(row: Samples, name: str, times: NDArray[np.float64], tone: str, x: Scale, base: float) -> Markup:
    """A histogram of 80 bins, smoothed over five, as an area."""
    edges = np.linspace(x.low, x.high, 81)
    counts, _ = np.histogram(np.clip(times, x.low, x.high), bins=edges)
    smooth = np.convolve(np.pad(counts, 2), [1, 2, 3, 2, 1], mode="same")[2:-2]
    tall = smooth / max(float(smooth.max()), 1.0) * (ROW_PX - 10)
    centres = (edges[:-1] + edges[1:]) / 2
    top = "".join(f"L{x.at(float(c)):.1f} {base - h:.1f}" for c, h in zip(centres, tall, strict=True))
    area = f"M{x.start:.1f} {base:.1f}{top}L{x.end:.1f} {base:.1f}Z"
    at, samples = x.at(float(np.median(times))), row.by_name[name]
    counted = f"{len(samples)} samples, up to {max(samples):.4g} ms"
    tip = f"{row.label}, {name}: median {np.median(samples):.4g} ms, {counted}"
    median = line(f"whisker {tone}", (at, at), (base - ROW_PX + 10, base))
    return group(tip, path(f"area {tone}", area), median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A measured ratio beside the noise of the same machine (A/A) and what the operation counts promise."""

    label: str
    ratio: Point | None
    noise: tuple[float, float] | None
    promised: float | None


def gains(rows: Sequence[Gain], *, title: str, x_label: str) -> Drawing:
    """One row a batch: the speed-up with its interval, the noise band around 1, the promised ratio as a dashed tick."""
    left, right = 58, WIDTH - 50
    bottom = HEAD + len(rows) * ROW_PX
    measured = [v for r in rows if r.ratio for v in (r.ratio.value, r.ratio.low, r.ratio.high)]
    ratios = [v for r in rows for v in (*(r.noise or ()), r.promised or 1.0)]
    x = linear([1.0, *measured, *ratios], start=left, end=right, zero=False)
    marks = [grid_x(x, HEAD, bottom, x_label), legend([("dense against itself", "band"), ("reduced", "reduced")])]
    if any(row.promised for row in rows):
        marks.append(text(WIDTH - 2, 13, "┆ promised by MACs", anchor="end"))
    marks.append(line("bound", (x.at(1), x.at(1)), (HEAD, bottom)))
    marks += [mark for i, row in enumerate(rows) for mark in _gain(row, x, HEAD + (i + 0.5) * ROW_PX)]
    return Drawing(title=title, height=bottom + 42, marks=tuple(marks))


def _gain(row: Gain, x: Scale, y: float) -> list[Markup]:
    marks = [text(2, y + 4, row.label, css="name")]
    if row.noise is not None:
        low, high = x.at(row.noise[0]), x.at(row.noise[1])
        tip = f"{row.label}: dense against itself {row.noise[0]:.3f} to {row.noise[1]:.3f}"
        marks.append(group(tip, bar("band", (low, max(high, low + 1.5)), (y - 11, y + 11), 3)))
    if row.promised is not None:
        at = x.at(row.promised)
        tick = line("whisker dense dash", (at, at), (y - 12, y + 12))
        marks.append(group(f"MAC ratio: {row.promised:.2f}x", tick))
    if row.ratio is None:
        return [*marks, text(x.end + 6, y + 4, "no run", css="note")]
    low, mid, high = x.at(row.ratio.low), x.at(row.ratio.value), x.at(row.ratio.high)
    tip = f"{row.label}: {row.ratio.value:.3f}x{row.ratio.ends('.3f')}"
    whisker = f"M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"
    marks.append(group(tip, path("whisker reduced", whisker), dot(mid, y, "reduced", 3.5)))
    return [*marks, text(WIDTH - 2, y + 4, f"{row.ratio.value:.2f}×", anchor="end", css="name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row's value before and after."""

    label: str
    before: float
    after: float


def dumbbells(rows: Sequence[Change], *, title: str, x_label: str, before: str, after: str) -> Drawing:
    """One row a site on a logarithmic axis: an open ring before, a full dot after, a line between."""
    row_px = 22 if len(rows) <= 16 else 17
    left, right, head = 118, WIDTH - 16, 36
    bottom = head + len(rows) * row_px
    x = logarithmic([v for r in rows for v in (r.before, r.after)], start=left, end=right, least=LEAST_ERROR)
    marks = [grid_x(x, head, bottom, x_label), legend([(before, "dense"), (after, "reduced")])]
    for i, row in enumerate(rows):
        y, ends = head + (i + 0.5) * row_px, [x.at(max(value, LEAST_ERROR)) for value in (row.before, row.after)]
        tip = f"{row.label}: {row.before:.3g} before, {row.after:.3g} after"
        label = text(left - 10, y + 4, row.label, anchor="end", css="name")
        between = line("whisker reduced", (ends[0], ends[1]), (y, y))
        marks.append(group(tip, label, between, dot(ends[0], y, "dense open"), dot(ends[1], y, "reduced")))
    return Drawing(title=title, height=bottom + 42, marks=tuple(marks))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedValue:
    """One row's value, its bound (None: none was set) and the status that the record gives it."""

    label: str
    value: float
    bound: float | None
    status: str


def bounded(rows: Sequence[BoundedValue], *, title: str, x_label: str) -> Drawing:
    """One row a link on a logarithmic axis: the room up to the bound, and a dot in the colour of the status."""
    left, right, head = 8, WIDTH - 8, 6
    bottom = head + len(rows) * 46
    values = [v for r in rows for v in (r.value, r.bound or r.value) if math.isfinite(v)]
    x = logarithmic([*values, 1e-8, 1e-1], start=left, end=right, least=1e-8)
    marks = [grid_x(x, head, bottom, x_label), *(_bounded(row, x, head + i * 46 + 32) for i, row in enumerate(rows))]
    return Drawing(title=title, height=bottom + 42, marks=tuple(marks))


def _bounded(row: BoundedValue, x: Scale, y: float) -> Markup:
    tone = {"PASS": "pass", "FAIL": "fail"}.get(row.status, "dense")
    value = f"{row.value:.2g}" if math.isfinite(row.value) else "not finite"
    allowed = "no limit" if row.bound is None else f"of {row.bound:.2g}"
    room = []
    if row.bound is not None:
        end = x.at(max(row.bound, 1e-8))
        room = [bar("room", (x.start, end), (y - 6, y + 6), 2), line("bound", (end, end), (y - 8, y + 8))]
    name = text(x.start, y - 13, row.label, css="name")
    figure = text(x.end, y - 13, f"{value} {allowed}", anchor="end")
    mark = dot(x.at(max(row.value, 1e-8)), y, tone, 5)
    track = line("track", (x.start, x.end), (y, y))
    return group(f"{row.label}: {value} {allowed}", *room, track, name, figure, mark)
