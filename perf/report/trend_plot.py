"""The plot of a figure over releases: lines with intervals, levels that changed marked where they began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .plots import Series, line_with_whiskers
from .scales import linear
from .svg import WIDTH, Drawing, grid_y, group, legend, line, text

MOST_LABELS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The place where a level began, in words; `tone` is fail, pass or note."""

    place: int
    tone: str
    tip: str


def trend(series: Sequence[Series], marks: Sequence[Mark], count: int, *, title: str, unit: str) -> Drawing:
    """Series over `count` releases, whose points are labelled from "1" on; every few of them have their label."""
    left, right, top, bottom = 52, WIDTH - 14, 34, 236
    values = [v for s in series for p in s.points for v in (p.low, p.value, p.high)]
    y = linear(values, start=bottom, end=top, zero=False)
    step = (right - left - 24) / max(count - 1, 1)
    places = {str(i + 1): left + 12 + i * step if count > 1 else (left + right) / 2 for i in range(count)}
    every = -(-count // MOST_LABELS)
    drawn: list[Markup] = [grid_y(y, left, right, unit), legend([(s.name, s.tone) for s in series])]
    drawn += [text(places[str(i + 1)], bottom + 18, str(i + 1), anchor="middle") for i in range(0, count, every)]
    drawn.append(text((left + right) / 2, bottom + 36, "release", anchor="middle"))
    for mark in marks:
        between = places[str(mark.place + 1)] - min(step, right - left) / 2
        drawn.append(group(mark.tip, line(f"whisker {mark.tone} dash", (between, between), (top, bottom))))
    drawn += [each for s in series for each in line_with_whiskers(s, places, y, unit)]
    return Drawing(title=title, height=280, marks=tuple(drawn))
