"""Which plots a story gives, each with its caption."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from perf.parity.parity import Parity
from perf.stats.stats import Interval
from perf.stats.summary import Side, Summary, SummaryRow

from . import plots
from .content import Content, SiteLine
from .plots import Bounded, Change, Gain, Point, Samples, Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with its title and the sentence that says how to read it; `key` names its file."""

    key: str
    title: str
    under: str
    svg: str


def speed_figures(story: Content) -> list[Figure]:
    """Latency, throughput, speed-up beside noise and promise, distribution of samples: those that were measured."""
    if story.summary is None:
        return []
    rows = story.summary.rows
    made = [
        _curve(rows, "latency", "Latency by batch", "ms", lambda side: side.p50_ms, log=True),
        _curve(rows, "throughput", "Throughput by batch", "images/s", lambda side: side.throughput, log=False),
        _speedup(story),
        _samples(story.summary),
    ]
    return [figure for figure in made if figure is not None]


def fidelity_figures(story: Content) -> list[Figure]:
    """The parity chain and the error of each site."""
    made = [_chain(story.parity) if story.parity else None, _sites(story.sites)]
    return [figure for figure in made if figure is not None]


def _curve(
    rows: tuple[SummaryRow, ...], key: str, title: str, unit: str, get: Callable[[Side], Interval | None], *, log: bool
) -> Figure | None:
    names = list(dict.fromkeys(name for row in rows for name in row.sides))
    series = []
    for name, tone in zip(names, ("dense", "reduced"), strict=False):
        values = [(str(row.batch), get(row.sides[name])) for row in rows]
        points = tuple(_point(label, value) for label, value in values if value is not None)
        series += [Series(name=name, tone=tone, points=points)] if points else []
    if not series:
        return None
    measure = rows[0].measure.replace("_", " ")
    under = (
        f"Median {measure} time on a log scale, with its 95 % interval." if log else "Images per second of wall time."
    )
    svg = plots.curve(series, title=title, unit=unit, across="batch size", log=log)
    return Figure(key=key, title=title, under=under, svg=svg)


def _speedup(story: Content) -> Figure | None:
    assert story.summary is not None
    assert story.bench is not None
    before, after = (subject.macs for subject in story.bench.subjects)
    promised = before / after if before and after else None
    gains = [_gain(row, promised) for row in story.summary.rows]
    if not any(gain.ratio for gain in gains):
        return None
    return Figure(
        key="speedup",
        title="Speed-up beside noise and promise",
        under="Ratio of medians, 95 % intervals; grey is the machine's own noise.",
        svg=plots.gains(gains, title="Speed-up by batch", across="dense time / reduced time"),
    )


def _gain(row: SummaryRow, promised: float | None) -> Gain:
    noise = row.noise if row.noise and math.isfinite(row.noise.high) else None
    return Gain(
        label=f"batch {row.batch}",
        ratio=_point(str(row.batch), row.speedup) if row.speedup else None,
        noise=(noise.low, noise.high) if noise else None,
        promised=promised,
    )


def _samples(summary: Summary) -> Figure | None:
    rows = [
        Samples(label=f"batch {row.batch}", by_name={name: side.times_ms for name, side in row.sides.items()})
        for row in summary.rows
        if all(side.times_ms for side in row.sides.values())
    ]
    if not rows:
        return None
    return Figure(
        key="samples",
        title="Distribution of samples",
        under="Every kept call; the vertical line is the median.",
        svg=plots.distributions(rows, title="Distribution of samples", across=f"time / median of {summary.reference}"),
    )


def _chain(parity: Parity) -> Figure:
    rows = [
        Bounded(
            label=link.name,
            value=link.measures.relative_error,
            bound=link.tolerance.max_relative_error,
            status=link.status,
        )
        for link in parity.links
    ]
    return Figure(
        key="parity",
        title="Error of each link",
        under="The band ends where the link's tolerance ends.",
        svg=plots.bounded(rows, title="Error of each link", across="relative error of the logits"),
    )


def _sites(sites: tuple[SiteLine, ...]) -> Figure | None:
    changes = [
        Change(label=site.site, before=site.error_uncompensated, after=site.error)
        for site in sites
        if site.error_uncompensated is not None and site.error is not None
    ]
    if not changes:
        return None
    return Figure(
        key="sites",
        title="Error of each site",
        under="Of the site's output, before and after the compensation.",
        svg=plots.dumbbells(
            changes, title="Error of each site", across="relative error", before="only cut", after="compensated"
        ),
    )


def _point(label: str, value: Interval) -> Point:
    known = math.isfinite(value.high) and value.low > 0
    low, high = (value.low, value.high) if known else (value.value, value.value)
    return Point(label=label, value=value.value, low=low, high=high)
