"""The report as one HTML page without scripts or external resources; its templates escape all text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment

from ground.templates import template_environment
from ground.text import printable
from perf.stats.stats import Interval
from perf.stats.summary import SubjectSummary, SummaryRow

from . import plots
from .content import Content, VerdictLine, build_lead, build_tiles, describe_setup, list_verdicts
from .curves import images_figure
from .history import history_figures
from .numbers import ReportTable
from .plots import PlotSeries
from .svg import Figure
from .tables import build_tables


def speed_figures(content: Content) -> list[Figure]:
    if content.summary is None or content.bench is None:
        return []
    rows = content.summary.rows
    figures = _curve(rows, "Latency by batch", "ms", lambda side: side.p50_ms, log=True)
    figures += _curve(rows, "Throughput by batch", "images/s", lambda side: side.throughput, log=False)
    before, after = (subject.macs for subject in content.bench.subjects)
    pairs = {f"batch {row.batch}": (row.speedup and plots.shown_interval(row.speedup), _noise(row)) for row in rows}
    if any(ratio for ratio, _ in pairs.values()):
        drawing = plots.draw_gains(pairs, before / after if before and after else None)
        figures.append(Figure("Ratio of medians, 95 % intervals; grey is the machine's own noise.", drawing))
    times = {f"batch {row.batch}": {name: side.times_ms for name, side in row.sides.items()} for row in rows}
    if kept := {label: by_name for label, by_name in times.items() if all(by_name.values())}:
        figures.append(Figure("Every kept call; the vertical line is the median.", plots.draw_distributions(kept)))
    return figures


def _curve(
    rows: tuple[SummaryRow, ...], title: str, unit: str, get: Callable[[SubjectSummary], Interval | None], *, log: bool
) -> list[Figure]:
    names = list(dict.fromkeys(name for row in rows for name in row.sides))
    series = []
    for name, tone in zip(names, ("dense", "reduced"), strict=False):
        values = [(str(row.batch), get(row.sides[name])) for row in rows]
        points = [(label, plots.shown_interval(value)) for label, value in values if value is not None]
        series += [PlotSeries(name=name, tone=tone, points=points)] if points else []
    if not series:
        return []
    median = f"Median {rows[0].measure.replace('_', ' ')} time on a log scale, with its 95 % interval."
    drawing = plots.draw_curve(series, title=title, unit=unit, x_label="batch size", log=log)
    return [Figure(median if log else "Images per second of wall time.", drawing)]


def _noise(row: SummaryRow) -> Interval | None:
    return row.noise if row.noise and row.noise.is_bounded else None


def fidelity_figures(content: Content) -> list[Figure]:
    figures = []
    if content.parity:
        drawing = plots.draw_links(content.parity.links, x_label=f"relative error of the {content.parity.compared}")
        figures.append(Figure("The band ends where the link's tolerance ends.", drawing))
    errors = {site.site: (site.error_uncompensated, site.error) for site in content.sites}
    known = {site: (cut, mended) for site, (cut, mended) in errors.items() if cut is not None and mended is not None}
    if known:
        figures.append(Figure("Of the site's output, before and after the compensation.", plots.draw_sites(known)))
    return figures


TONES = {"PASS": "pass", "FAIL": "fail"} | dict.fromkeys(
    ("INCONCLUSIVE", "NOT-COMPARABLE", "NOTED", "UNJUDGED"), "note"
)
# Keys of the tables that are side by side under the headline, and of those under the plots of the same numbers.
BESIDE, SPEED, FIDELITY = (
    ("models", "effects"),
    ("latency", "end_to_end", "energy", "gate"),
    ("parity", "located", "structure"),
)
WARNINGS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    text: str
    warns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with remarks, plots in two columns, and tables, also in two columns if they are pairs."""

    title: str
    remarks: tuple[Remark, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    is_paired: bool = False


def html_from_content(content: Content) -> str:
    by_key, tones = build_tables(content), {_tone(stated.verdict) for stated in list_verdicts(content)}
    page = _environment().get_template("page.html")
    return page.render(
        content=content,
        where=describe_setup(content),
        verdicts=list_verdicts(content),
        tone=next((tone for tone in ("fail", "note", "pass") if tone in tones), "none"),
        lead=build_lead(content),
        tiles=build_tiles(content),
        beside=[by_key[key] for key in BESIDE if key in by_key],
        sections=_sections(content, by_key),
    )


def html_from_sections(
    title: str, sections: Sequence[Section], *, lead: str = "", verdicts: Sequence[VerdictLine] = ()
) -> str:
    """Return a page with a lead or verdicts above the sections."""
    page = _environment().get_template("sections.html")
    return page.render(title=title, lead=lead, sections=sections, verdicts=verdicts)


def shown(value: object) -> object:
    """Return a text in printable form; drawings and other values unchanged."""
    return printable(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = template_environment("perf.report", is_html=True, finalize=shown)
    environment.globals |= {"tones": TONES, "tone_of": _tone, "zip": zip}
    environment.filters["unbroken"] = lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%")
    return environment


def _tone(verdict: str) -> str:
    return TONES.get(verdict, "note")


def _sections(content: Content, by_key: dict[str, ReportTable]) -> list[Section]:
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
    return tuple(history_figures(content.history)) if key == "history" and content.history else ()


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
