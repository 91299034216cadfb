"""Files for benchmark tracking: lists for actions that plot benchmarks over commits, and Bencher's format."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ground.errors import BadInput
from ground.files import write_text
from ground.quantity import format_number
from perf.gate.evidence import Evidence

from .bencher import bmf_from_figures
from .figures import BIGGER_IS_BETTER, Figure, figures_of


def write_tracking(now: Evidence, directory: Path) -> None:
    """Write smaller-is-better.json and bigger-is-better.json for actions, and bencher.json for Bencher."""
    if now.bench is None:
        raise BadInput("--track writes timings; give a bench.json among the records")
    figures = tuple(figures_of(now))
    bigger = [each for each in figures if each.measure in BIGGER_IS_BETTER]
    write_text(
        directory / "smaller-is-better.json", tracked_from_figures(each for each in figures if each not in bigger)
    )
    write_text(directory / "bigger-is-better.json", tracked_from_figures(bigger))
    write_text(directory / "bencher.json", bmf_from_figures(figures))


def tracked_from_figures(figures: Iterable[Figure]) -> str:
    """Return a list of JSON objects with name, unit, value and, if there is an interval, range."""
    return json.dumps([_entry(each) for each in figures], indent=1, allow_nan=False) + "\n"


def _entry(figure: Figure) -> dict[str, Any]:
    words = (figure.measure,) if figure.measure == "speed-up" else (figure.subject, figure.output, figure.measure)
    name = " ".join(filter(None, words)) + ("" if figure.batch is None else f" at batch {figure.batch}")
    entry = {"name": name, "unit": figure.unit, "value": figure.value}
    if figure.low is not None and figure.high is not None:
        entry["range"] = f"{format_number(figure.low, 4)} to {format_number(figure.high, 4)}"
    return entry
