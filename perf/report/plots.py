"""Plots as inline SVG, 460 units wide: drawn by hand so that a report needs nothing from outside. Colours are CSS.

Every figure is a string that stands alone in a page; `standalone` makes a file of it. Hovering a mark shows its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from .scales import Scale, linear, logarithmic
from .svg import MARKS as MARKS
from .svg import PALETTE as PALETTE
from .svg import WIDTH as WIDTH
from .svg import figure, grid_x, grid_y, legend, text
from .svg import standalone as standalone

HEAD, ROW_PX = 36, 38  # of figures with one row a batch, so that two of them line up


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value at a labelled place, with its interval (equal bounds: none known)."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one colour; `tone` is dense or reduced."""

    name: str
    tone: str
    points: tuple[Point, ...]


def curve(series: Sequence[Series], *, title: str, unit: str, across: str, log: bool) -> str:
    """Lines with intervals over evenly spaced labels (batch sizes), the legend above."""
    labels = list(dict.fromkeys(p.label for s in series for p in s.points))
    left, right, top, bottom = 46, WIDTH - 14, 34, 236
    values = [v for s in series for p in s.points for v in (p.low, p.value, p.high)]
    make = logarithmic if log else linear
    y = make(values, start=bottom, end=top)
    step = (right - left - 36) / max(len(labels) - 1, 1)
    places = {label: left + 18 + i * step for i, label in enumerate(labels)}
    if len(labels) == 1:
        places = {labels[0]: (left + right) / 2}
    body = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series])]
    body += [text(x, bottom + 18, label, anchor="middle") for label, x in places.items()]
    body += [text((left + right) / 2, bottom + 36, across, anchor="middle")]
    body += [_line_with_whiskers(s, places, y, unit) for s in series]
    return figure(title, 280, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of both subjects at one batch size, in milliseconds, by name; the first name is the reference."""

    label: str
    by_name: Mapping[str, Sequence[float]]


def distributions(rows: Sequence[Samples], *, title: str, across: str) -> str:
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
    body = [
        grid_x(x, HEAD, bottom, across),
        legend(list(tones.items())),
        text(WIDTH - 2, 13, "median, ms", anchor="end"),
    ]
    for place, (row, times) in enumerate(zip(rows, relative, strict=True)):
        base = HEAD + (place + 1) * ROW_PX - 3
        medians = " → ".join(f"{np.median(samples):#.3g}".rstrip(".") for samples in row.by_name.values())
        body.append(
            text(2, base - 9, row.label, css="name") + text(WIDTH - 2, base - 9, medians, anchor="end", css="name")
        )
        body += [_density(row, name, times[name], tones[name], x, base) for name in row.by_name]
    return figure(title, bottom + 42, body)


def _without_outliers(times: NDArray[np.float64]) -> tuple[float, float]:
    """The range of the samples, cut three interquartile ranges beyond the quartiles."""
    low, high = np.quantile(times, [0.25, 0.75])
    reach = 3 * (high - low)
    return float(max(times.min(), low - reach)), float(min(times.max(), high + reach))


def _relative(row: Samples) -> dict[str, NDArray[np.float64]]:
    reference = float(np.median(next(iter(row.by_name.values()))))
    return {name: np.asarray(times, dtype=np.float64) / reference for name, times in row.by_name.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A measured ratio beside the noise of the same machine (A/A) and what the operation counts promise."""

    label: str
    ratio: Point | None
    noise: tuple[float, float] | None
    promised: float | None


def gains(rows: Sequence[Gain], *, title: str, across: str) -> str:
    """One row a batch: the speed-up with its interval, the noise band around 1, the promised ratio as a dashed tick."""
    left, right = 58, WIDTH - 50
    bottom = HEAD + len(rows) * ROW_PX
    measured = [v for r in rows if r.ratio for v in (r.ratio.value, r.ratio.low, r.ratio.high)]
    around = [v for r in rows for v in (*(r.noise or ()), r.promised or 1.0)]
    x = linear([1.0, *measured, *around], start=left, end=right, zero=False)
    promised = any(row.promised for row in rows)
    body = [grid_x(x, HEAD, bottom, across), legend([("dense against itself", "band"), ("reduced", "reduced")])]
    body += [text(WIDTH - 2, 13, "┆ promised by MACs", anchor="end")] if promised else []
    body.append(f'<line class="bound" x1="{x.at(1):.1f}" x2="{x.at(1):.1f}" y1="{HEAD}" y2="{bottom}"/>')
    body += [_gain(row, x, HEAD + (i + 0.5) * ROW_PX) for i, row in enumerate(rows)]
    return figure(title, bottom + 42, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row's value before and after."""

    label: str
    before: float
    after: float


def dumbbells(rows: Sequence[Change], *, title: str, across: str, before: str, after: str) -> str:
    """One row a site on a logarithmic axis: an open ring before, a full dot after, a line between."""
    row_px = 22 if len(rows) <= 16 else 17
    left, right, head = 118, WIDTH - 16, 36
    bottom = head + len(rows) * row_px
    x = logarithmic([v for r in rows for v in (r.before, r.after)], start=left, end=right, least=1e-9)
    body = [grid_x(x, head, bottom, across), legend([(before, "dense"), (after, "reduced")])]
    for i, row in enumerate(rows):
        y, a, b = head + (i + 0.5) * row_px, x.at(max(row.before, 1e-9)), x.at(max(row.after, 1e-9))
        tip = f"{row.label}: {row.before:.3g} before, {row.after:.3g} after"
        body.append(
            f"<g><title>{escape(tip)}</title>{text(left - 10, y + 4, row.label, anchor='end', css='name')}"
            f'<line class="whisker reduced" x1="{a:.1f}" x2="{b:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="dense open" cx="{a:.1f}" cy="{y:.1f}" r="4"/>'
            f'<circle class="reduced" cx="{b:.1f}" cy="{y:.1f}" r="4"/></g>'
        )
    return figure(title, bottom + 42, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """One row's value, its bound (None: none was set) and the status that the record gives it."""

    label: str
    value: float
    bound: float | None
    status: str


def bounded(rows: Sequence[Bounded], *, title: str, across: str) -> str:
    """One row a link on a logarithmic axis: the room up to the bound, and a dot in the colour of the status."""
    left, right, head = 8, WIDTH - 8, 6
    bottom = head + len(rows) * 46
    values = [v for r in rows for v in (r.value, r.bound or r.value) if math.isfinite(v)]
    x = logarithmic([*values, 1e-8, 1e-1], start=left, end=right, least=1e-8)
    body = [grid_x(x, head, bottom, across)]
    body += [_bounded(row, x, head + i * 46 + 32) for i, row in enumerate(rows)]
    return figure(title, bottom + 42, body)


def _line_with_whiskers(series: Series, places: Mapping[str, float], y: Scale, unit: str) -> str:
    dots = [(places[p.label], p) for p in series.points]
    path = " ".join(f"{x:.1f},{y.at(p.value):.1f}" for x, p in dots)
    marks = [f'<polyline class="path {series.tone}" points="{path}"/>']
    for x, p in dots:
        tip = f"{series.name}, {p.label}: {p.value:.4g} {unit} ({p.low:.4g} to {p.high:.4g})"
        up, down = y.at(p.high), y.at(p.low)
        marks.append(
            f"<g><title>{escape(tip)}</title>"
            f'<path class="whisker {series.tone}" '
            f'd="M{x - 4:.1f} {up:.1f}h8M{x:.1f} {up:.1f}V{down:.1f}M{x - 4:.1f} {down:.1f}h8"/>'
            f'<circle class="{series.tone}" cx="{x:.1f}" cy="{y.at(p.value):.1f}" r="3.5"/></g>'
        )
    return "".join(marks)


def _bounded(row: Bounded, x: Scale, y: float) -> str:
    tone = {"PASS": "pass", "FAIL": "fail"}.get(row.status, "dense")
    value = f"{row.value:.2g}" if math.isfinite(row.value) else "not finite"
    allowed = "no limit" if row.bound is None else f"of {row.bound:.2g}"
    room = ""
    if row.bound is not None:
        end = x.at(max(row.bound, 1e-8))
        room = (
            f'<rect class="room" x="{x.start}" y="{y - 6}" width="{end - x.start:.1f}" height="12" rx="2"/>'
            f'<line class="bound" x1="{end:.1f}" x2="{end:.1f}" y1="{y - 8}" y2="{y + 8}"/>'
        )
    return (
        f"<g><title>{escape(f'{row.label}: {value} {allowed}')}</title>{room}"
        f'<line class="track" x1="{x.start}" x2="{x.end}" y1="{y}" y2="{y}"/>'
        f"{text(x.start, y - 13, row.label, css='name')}{text(x.end, y - 13, f'{value} {allowed}', anchor='end')}"
        f'<circle class="{tone}" cx="{x.at(max(row.value, 1e-8)):.1f}" cy="{y}" r="5"/></g>'
    )


def _gain(row: Gain, x: Scale, y: float) -> str:
    parts = [text(2, y + 4, row.label, css="name")]
    if row.noise is not None:
        low, high = x.at(row.noise[0]), x.at(row.noise[1])
        tip = f"{row.label}: dense against itself {row.noise[0]:.3f} to {row.noise[1]:.3f}"
        parts.append(
            f'<rect class="band" x="{low:.1f}" y="{y - 11:.1f}" width="{max(high - low, 1.5):.1f}" height="22" rx="3">'
            f"<title>{escape(tip)}</title></rect>"
        )
    if row.promised is not None:
        at = x.at(row.promised)
        parts.append(
            f'<line class="whisker dense dash" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 12:.1f}" y2="{y + 12:.1f}">'
            f"<title>{escape(f'MAC ratio: {row.promised:.2f}x')}</title></line>"
        )
    if row.ratio is None:
        return "".join([*parts, text(x.end + 6, y + 4, "no run", css="note")])
    low, mid, high = x.at(row.ratio.low), x.at(row.ratio.value), x.at(row.ratio.high)
    tip = f"{row.label}: {row.ratio.value:.3f}x ({row.ratio.low:.3f} to {row.ratio.high:.3f})"
    parts.append(
        f"<g><title>{escape(tip)}</title>"
        f'<path class="whisker reduced" '
        f'd="M{low:.1f} {y - 4:.1f}v8M{low:.1f} {y:.1f}H{high:.1f}M{high:.1f} {y - 4:.1f}v8"/>'
        f'<circle class="reduced" cx="{mid:.1f}" cy="{y:.1f}" r="3.5"/></g>'
        f"{text(WIDTH - 2, y + 4, f'{row.ratio.value:.2f}×', anchor='end', css='name')}"
    )
    return "".join(parts)


def _density(row: Samples, name: str, times: NDArray[np.float64], tone: str, x: Scale, base: float) -> str:
    """A histogram of 80 bins, smoothed over five, as an area."""
    edges = np.linspace(x.low, x.high, 81)
    counts, _ = np.histogram(np.clip(times, x.low, x.high), bins=edges)
    smooth = np.convolve(np.pad(counts, 2), [1, 2, 3, 2, 1], mode="same")[2:-2]
    tall = smooth / max(float(smooth.max()), 1.0) * (ROW_PX - 10)
    centres = (edges[:-1] + edges[1:]) / 2
    line = " ".join(f"L{x.at(float(c)):.1f} {base - h:.1f}" for c, h in zip(centres, tall, strict=True))
    at, samples = x.at(float(np.median(times))), row.by_name[name]
    tip = (
        f"{row.label}, {name}: median {np.median(samples):.4g} ms, {len(samples)} samples, up to {max(samples):.4g} ms"
    )
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<path class="area {tone}" d="M{x.start:.1f} {base}{line}L{x.end:.1f} {base}Z"/>'
        f'<line class="whisker {tone}" x1="{at:.1f}" x2="{at:.1f}" y1="{base - ROW_PX + 10}" y2="{base}"/></g>'
    )
