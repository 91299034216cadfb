"""The report as one HTML page: no script, nothing from outside; light and dark, phone to paper.

The templates escape every word that they are given; only drawings (see svg) come as markup.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment

from ground.templates import templates_of
from ground.text import printable

from .content import Content
from .figures import fidelity_figures, speed_figures
from .headline import lead, tiles, verdicts, where
from .history import history_figures
from .images_plot import images_figure
from .numbers import Table
from .svg import Figure
from .tables import tables

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
