"""Which plots a report has, each with its caption."""

from collections.abc import Callable

from perf.parity.parity import Parity
from perf.stats.stats import Interval
from perf.stats.summary import Side, Summary, SummaryRow

from . import plots
from .content import Content, SiteLine
from .plots import BoundedValue, Change, Gain, Point, Samples, Series
from .svg import Figure


def speed_figures(content: Content) -> list[Figure]:
    """Latency, throughput, speed-up beside noise and promise, distribution of samples: those that were measured."""
    if content.summary is None:
        return []
    rows = content.summary.rows
    figures = [
        _curve(rows, "Latency by batch", "ms", lambda side: side.p50_ms, log=True),
        _curve(rows, "Throughput by batch", "images/s", lambda side: side.throughput, log=False),
        _speedup(content),
        _samples(content.summary),
    ]
    return [figure for figure in figures if figure is not None]


def fidelity_figures(content: Content) -> list[Figure]:
    """The parity chain and the error of each site."""
    figures = [_chain(content.parity) if content.parity else None, _sites(content.sites)]
    return [figure for figure in figures if figure is not None]


def _curve(
    rows: tuple[SummaryRow, ...], title: str, unit: str, get: Callable[[Side], Interval | None], *, log: bool
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
    caption = (
        f"Median {measure} time on a log scale, with its 95 % interval." if log else "Images per second of wall time."
    )
    drawing = plots.curve(series, title=title, unit=unit, x_label="batch size", log=log)
    return Figure(caption=caption, drawing=drawing)


def _speedup(content: Content) -> Figure | None:
    assert content.summary is not None
    assert content.bench is not None
    before, after = (subject.macs for subject in content.bench.subjects)
    promised = before / after if before and after else None
    gains = [_gain(row, promised) for row in content.summary.rows]
    if not any(gain.ratio for gain in gains):
        return None
    return Figure(
        caption="Ratio of medians, 95 % intervals; grey is the machine's own noise.",
        drawing=plots.gains(gains, title="Speed-up beside noise and promise", x_label="dense time / reduced time"),
    )


def _gain(row: SummaryRow, promised: float | None) -> Gain:
    noise = row.noise if row.noise and row.noise.is_bounded else None
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
    x_label = f"time / median of {summary.reference}"
    return Figure(
        caption="Every kept call; the vertical line is the median.",
        drawing=plots.distributions(rows, title="Distribution of samples", x_label=x_label),
    )


def _chain(parity: Parity) -> Figure:
    rows = [
        BoundedValue(
            label=link.name,
            value=link.measures.relative_error,
            bound=link.tolerance.max_relative_error,
            status=link.status,
        )
        for link in parity.links
    ]
    return Figure(
        caption="The band ends where the link's tolerance ends.",
        drawing=plots.bounded(rows, title="Error of each link", x_label=f"relative error of the {parity.compared}"),
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
        caption="Of the site's output, before and after the compensation.",
        drawing=plots.dumbbells(
            changes, title="Error of each site", x_label="relative error", before="only cut", after="compensated"
        ),
    )


def _point(label: str, value: Interval) -> Point:
    is_positive = value.is_bounded and value.low > 0
    low, high = (value.low, value.high) if is_positive else (value.value, value.value)
    return Point(label=label, value=value.value, low=low, high=high)
