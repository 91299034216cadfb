"""Pieces that every plot shares, as SVG text: colours as CSS variables, text, legend, grids, the frame."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .scales import Scale, short

WIDTH = 460
PALETTE = """
:root { --ink: #16202e; --muted: #5b6675; --line: #dfe4ea; --page: #fff; --dense: #8793a3; --reduced: #0f6fde;
  --soft: #0f6fde26; --densesoft: #8793a333; --pass: #137a4b; --fail: #c0262d; --note: #9a6200;
  --passsoft: #137a4b1f }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf3; --muted: #9aa7b6; --line: #2b3542; --page: #10161d; --dense: #8a98aa; --reduced: #5aa9ff;
    --soft: #5aa9ff2b; --densesoft: #8a98aa38; --pass: #4cc38a;
    --fail: #ff7b7f; --note: #e3a94a; --passsoft: #4cc38a24 }
}
"""
MARKS = """
svg.plot { display: block; width: 100%; height: auto;
  font: 12px/1.2 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
.plot .grid { stroke: var(--line); stroke-width: 1 }
.plot .dense { stroke: var(--dense); fill: var(--dense) }
.plot .reduced { stroke: var(--reduced); fill: var(--reduced) }
.plot .pass { stroke: var(--pass); fill: var(--pass) }
.plot .fail { stroke: var(--fail); fill: var(--fail) }
.plot .note { stroke: var(--note); fill: var(--note) }
.plot text { fill: var(--muted); stroke: var(--page); stroke-width: 3px; paint-order: stroke; stroke-linejoin: round }
.plot text.name { fill: var(--ink) }
.plot text.note { fill: var(--note); stroke: var(--page) }
.plot .path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.plot .whisker { fill: none; stroke-width: 1.5 }
.plot .open { fill: var(--page); stroke-width: 1.75 }
.plot .bound { stroke: var(--ink); stroke-width: 2 }
.plot .band { fill: var(--dense); fill-opacity: .38; stroke: none }
.plot .room { fill: var(--passsoft); stroke: none }
.plot .track { stroke: var(--line); stroke-width: 1 }
.plot .area { stroke-width: 1.25 }
.plot .area.dense { fill: var(--densesoft) }
.plot .area.reduced { fill: var(--soft) }
.plot .dash { stroke-dasharray: 3 3 }
"""


def standalone(svg: str) -> str:
    """The figure as a file of its own: with its colours, light and dark."""
    head, rest = svg.split(">", 1)
    background = '<rect width="100%" height="100%" fill="var(--page)"/>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}><style>{PALETTE}{MARKS}</style>{background}{rest}\n'


def figure(title: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", css: str = "") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    parts, x = [], 2.0
    for name, tone in entries:
        parts.append(f'<circle class="{tone}" cx="{x + 5:.1f}" cy="9" r="4"/>{text(x + 14, 13, name, css="name")}')
        x += 30 + 7.2 * len(name)
    return "".join(parts)


def grid_y(y: Scale, left: float, right: float, unit: str) -> str:
    lines = [
        f'<line class="grid" x1="{left}" x2="{right}" y1="{y.at(t):.1f}" y2="{y.at(t):.1f}"/>'
        f"{text(left - 8, y.at(t) + 4, short(t), anchor='end')}"
        for t in y.ticks
    ]
    return "".join(lines) + text(right, 13, unit, anchor="end")


def grid_x(x: Scale, top: float, bottom: float, across: str) -> str:
    lines = [
        f'<line class="grid" x1="{x.at(t):.1f}" x2="{x.at(t):.1f}" y1="{top}" y2="{bottom}"/>'
        f"{text(x.at(t), bottom + 16, short(t), anchor='middle')}"
        for t in x.ticks
    ]
    return "".join(lines) + text((x.start + x.end) / 2, bottom + 35, across, anchor="middle")
