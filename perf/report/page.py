"""The report as one HTML page: no script, nothing from outside; light and dark, phone to paper.

The templates escape every word that they are given; only drawings (see svg) come as markup.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment

from ground.templates import templates_of
from ground.text import printable
from perf.parity.parity import Parity
from perf.stats.stats import Interval
from perf.stats.summary import Side, Summary, SummaryRow

from . import plots
from .content import Content, SiteLine
from .headline import lead, tiles, verdicts, where
from .history import history_figures
from .images_plot import images_figure
from .numbers import Table
from .plots import BoundedValue, Change, Gain, Point, Samples, Series
from .svg import Figure
from .tables import tables


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


TONES = {"PASS": "pass", "FAIL": "fail"} | dict.fromkeys(
    ("INCONCLUSIVE", "NOT-COMPARABLE", "NOTED", "UNJUDGED"), "note"
)
# These tables stand side by side under the headline, and these stand under the plots of the same numbers.
BESIDE, SPEED, FIDELITY = (
    ("models", "effects", "ways"),
    ("latency", "end_to_end", "gate"),
    ("parity", "located", "structure"),
)
WARNINGS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A sentence under a heading."""

    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with remarks, plots two by two, then tables."""

    title: str
    remarks: tuple[Remark, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


def html_from_content(content: Content) -> str:
    """One self-contained page."""
    by_key = tables(content)
    return (
        _environment()
        .get_template("page.html")
        .render(
            content=content,
            where=where(content),
            verdicts=verdicts(content),
            tone=_tone_of_all(stated.verdict for stated in verdicts(content)),
            lead=lead(content),
            tiles=tiles(content),
            beside=[by_key[key] for key in BESIDE if key in by_key],
            sections=_sections(content, by_key),
        )
    )


def html_from_sections(title: str, lead: str, sections: Sequence[Section]) -> str:
    """One self-contained page of a title, a sentence and sections."""
    return _environment().get_template("sections.html").render(title=title, lead=lead, sections=sections)


def shown(value: object) -> object:
    """A text printable; what is a drawing, or no text, as it is."""
    return printable(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = templates_of("perf.report", is_html=True, finalize=shown)
    environment.globals |= {"tones": TONES, "tone_of": _tone, "zip": zip}
    environment.filters["unbroken"] = _unbroken
    return environment


def _tone(verdict: str) -> str:
    return TONES.get(verdict, "note")


def _tone_of_all(verdicts: Iterable[str]) -> str:
    tones = {_tone(verdict) for verdict in verdicts}
    return next((tone for tone in ("fail", "note", "pass") if tone in tones), "none")


def _unbroken(text: str) -> str:
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _sections(content: Content, by_key: dict[str, Table]) -> list[Section]:
    """Those that have a figure or a table."""
    rest = [key for key in by_key if key not in (*BESIDE, *SPEED, *FIDELITY)]
    sections = [
        Section(
            title="Speed",
            remarks=tuple(_speed_remarks(content)),
            figures=tuple(speed_figures(content)),
            tables=tuple(by_key[key] for key in SPEED if key in by_key),
        ),
        Section(
            title="Fidelity",
            figures=tuple(fidelity_figures(content)),
            tables=tuple(by_key[key] for key in FIDELITY if key in by_key),
        ),
        *(Section(title=by_key[key].title, figures=_own_figures(content, key), tables=(by_key[key],)) for key in rest),
    ]
    return [section for section in sections if section.figures or section.tables]


def _own_figures(content: Content, key: str) -> tuple[Figure, ...]:
    size = content.calibration_size
    if key == "calibration-size" and size is not None:
        return (images_figure(size.points),)
    return tuple(history_figures(content.history)) if key == "history" else ()


def _speed_remarks(content: Content) -> list[Remark]:
    if content.summary is None:
        return []
    knee, warnings = content.summary.knee, content.summary.warnings
    remarks = [Remark(text=f"Preferred batch size {knee.batch}: {knee.reason}.")] if knee else []
    remarks += [Remark(text=f"Mind: {warning}", warns=True) for warning in warnings[:WARNINGS_SHOWN]]
    if len(warnings) > WARNINGS_SHOWN:
        more = len(warnings) - WARNINGS_SHOWN
        remarks.append(Remark(text=f"Mind: {more} more such remarks in the record", warns=True))
    return remarks
