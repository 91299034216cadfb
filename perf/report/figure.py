"""A plot as a report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from .svg import Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with the sentence that says how to read it."""

    caption: str
    drawing: Drawing
