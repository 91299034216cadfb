"""SVG elements with escaped contents, marks, legends and grids, and scales with round ticks.

A figure is WIDTH units wide. Colours are classes of templates/plot.css, and a pointer over a mark shows its value.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from unicodedata import east_asian_width

from markupsafe import Markup

from ground.text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A map of values [low, high] to pixels [start, end], where end may be smaller, as on a y axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        assert self.low < self.high, (self.low, self.high)
        assert not self.log or self.low > 0, self.low

    def at(self, value: float) -> float:
        """Return the pixel of a value, or of the nearest end for values outside."""
        inside = min(max(value, self.low), self.high)
        low, high, inside = (math.log(v) if self.log else v for v in (self.low, self.high, inside))
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else _linear_ticks(self.low, self.high)


def linear_scale(values: Iterable[float], *, start: float, end: float, zero: bool = True) -> Scale:
    """Return a linear scale for all finite values, from zero if `zero`, else with some room below; with room above."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = 0.08 * ((high - min(low, 0.0)) if zero else (high - low)) or 0.5 * abs(high) or 1.0
    return Scale(low=min(0.0, low) if zero else low - air, high=high + air, start=start, end=end)


def logarithmic_scale(values: Iterable[float], *, start: float, end: float, least: float = 1e-12) -> Scale:
    """Return a logarithmic scale for all values from `least` to 1e100, with some room on both sides."""
    finite = [max(v, least) for v in values if v < 1e100] or [1.0]
    low, high = min(finite), max(finite)
    air = (high / low) ** 0.07 if high > low else 2.0
    return Scale(low=low / max(air, 1.15), high=high * max(air, 1.15), start=start, end=end, log=True)


def tick_label(value: float) -> str:
    """Return the label of a tick, such as 0.001, 1, 20, 30k, 2M or 1e-6."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:g}{unit}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, round(decades / 5))
    digits = (1, 2, 5) if decades < 2.2 else (1,)
    ticks = [d * 10.0**e for e in range(first, last + 1) if e % every == 0 for d in digits]
    inside = [t for t in ticks if low <= t <= high]
    return inside if len(inside) > 1 else _linear_ticks(low, high)


WIDTH = 460
LETTER = 7.2  # mean width of a letter in the widest font of plot.css
NARROW_REL = 13 / 12  # how much larger letters are on narrow pages, by page.css


def width_of(label: str) -> float:
    """Return an upper estimate of a label's width, with East Asian letters counted twice."""
    return LETTER * sum(2 if east_asian_width(letter) in "WF" else 1 for letter in label)


def cut_in_middle(label: str, width: float) -> str:
    kept = len(label)
    while kept > 2 and width_of(cut := _cut(label, kept)) > width:
        kept -= 1
    return _cut(label, kept) if kept <= 2 else cut


def _cut(label: str, kept: int) -> str:
    return label if kept >= len(label) else f"{label[: kept // 2]}…{label[len(label) - (kept - kept // 2 - 1) :]}"


def axis_left(ticks: Iterable[float]) -> float:
    """Return the width to leave for the labels of a vertical axis, at least 46."""
    return max(46.0, 12 + max((width_of(tick_label(tick)) for tick in ticks), default=0.0))


def element(tag: str, *inside: str, **attributes: str | float) -> Markup:
    """Return an element; contents and attributes that aren't Markup are escaped, numbers have one decimal.

    An underscore in an attribute's name becomes a hyphen, and one at its end is dropped (`class_`).
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _shown(value))
        for name, value in attributes.items()
    )
    if not inside:
        return Markup("<{}{}/>").format(tag, written)
    return Markup("<{}{}>{}</{}>").format(tag, written, Markup("").join(map(_shown, inside)), tag)


def _shown(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    return printable(value) if isinstance(value, str) else f"{value:.1f}"


def group(tip: str, *marks: Markup) -> Markup:
    """Return marks that show `tip` under a pointer."""
    return element("g", element("title", tip), *marks)


def text(x: float, y: float, label: str, *, anchor: str = "start", css: str = "") -> Markup:
    return element("text", label, class_=css, x=x, y=y, text_anchor=anchor)


def dot(x: float, y: float, css: str, radius: float = 4.0) -> Markup:
    return element("circle", class_=css, cx=x, cy=y, r=radius)


def line(css: str, x: tuple[float, float], y: tuple[float, float]) -> Markup:
    return element("line", class_=css, x1=x[0], x2=x[1], y1=y[0], y2=y[1])


def bar(css: str, x: tuple[float, float], y: tuple[float, float], radius: float) -> Markup:
    """Return a box between two corners, with rounded corners."""
    return element("rect", class_=css, x=x[0], y=y[0], width=x[1] - x[0], height=y[1] - y[0], rx=radius)


def path(css: str, path_data: str) -> Markup:
    return element("path", class_=css, d=path_data)


def legend(entries: Sequence[tuple[str, str]], *, right: str = "") -> Markup:
    """Return names beside dots of their CSS class; long names are cut to the room that the text `right` leaves."""
    parts, x, room = [], 2.0, (WIDTH - 12) / NARROW_REL - width_of(right)
    is_long = sum(30 + width_of(name) for name, _ in entries) > room
    for name, css in entries:
        shown = cut_in_middle(name, room / len(entries) - 30) if is_long else name
        parts += [dot(x + 5, 9, css), text(x + 14, 13, shown, css="name")]
        x += 30 + width_of(shown)
    return Markup("").join(parts)


def grid_y(y: Scale, left: float, right: float, unit: str) -> Markup:
    parts = []
    for tick in y.ticks:
        level = y.at(tick)
        parts += [
            line("grid", (left, right), (level, level)),
            text(left - 8, level + 4, tick_label(tick), anchor="end"),
        ]
    return Markup("").join([*parts, text(right, 13, unit, anchor="end")])


def grid_x(x: Scale, top: float, bottom: float, x_label: str) -> Markup:
    parts = []
    for tick in x.ticks:
        place = x.at(tick)
        parts += [
            line("grid", (place, place), (top, bottom)),
            text(place, bottom + 16, tick_label(tick), anchor="middle"),
        ]
    middle = (x.start + x.end) / 2
    shown = cut_in_middle(x_label, 2 * min(middle, WIDTH - middle))
    return Markup("").join([*parts, text(middle, bottom + 35, shown, anchor="middle")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    title: str
    height: float
    marks: tuple[Markup, ...]

    @property
    def standalone(self) -> str:
        """The text of an SVG file with the style sheet for light and dark colours."""
        colours = resources.files(__package__).joinpath("templates", "plot.css").read_text(encoding="utf-8")
        background = element("rect", width="100%", height="100%", fill="var(--page)")
        # The style sheet is part of this package, so it is not escaped.
        drawn = self.inline(element("style", Markup(colours)), background)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn}\n'

    def inline(self, *before: Markup) -> Markup:
        frame = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {self.height:.0f}"}
        return element("svg", *before, *self.marks, class_="plot", role="img", aria_label=self.title, **frame)


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with a caption that says how to read it."""

    caption: str
    drawing: Drawing
