"""The history of bench records beside the gate: judged with the newest, written as record and plot, then kept."""

from collections.abc import Sequence
from pathlib import Path

from ground.files import write_text
from perf.gate.history import save_trend
from perf.record.history import load_history, release_of_file
from perf.report.history import trend_drawing
from perf.stats.trend import Trend, trend_of

TREND, PLOT = "history.json", "history.svg"


def trend_of_files(bench: Path, directory: Path) -> Trend:
    """The trend up to this bench record. Raises BadInput where it has no time, or `directory` is none."""
    return trend_of(load_history(directory), release_of_file(bench))


def write_trend(trend: Trend, directory: Path) -> None:
    """history.json, which `report` shows, and history.svg."""
    save_trend(trend, directory / TREND)
    write_text(directory / PLOT, trend_drawing(trend).standalone)


def trend_beside(outputs: Sequence[Path]) -> Path | None:
    """Where the trend goes: beside gate.json; None where none is written."""
    return next((path.parent for path in outputs if path.suffix == ".json"), None)
