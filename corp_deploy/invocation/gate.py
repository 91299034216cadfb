"""Options of `gate`. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .option import Record, option
from .proof_limits import confidence_option
from .values import DIRECTORY, Repeated


@dataclass(frozen=True, kw_only=True)
class GateOptions(Record):
    """By what records are judged, and what is kept of it."""

    rules: Sequence[str] = option(
        Repeated(),
        (),
        typed="fail_if",
        in_recipe="fail_if",
        help="What must not happen, such as 'p50@b1 > baseline*1.03'; may be given several times.",
    )
    confidence: float = confidence_option()
    history: Path | None = option(
        DIRECTORY,
        help="Judge bench.json against the releases kept in this directory, then add it; nothing there is overwritten.",
    )
    track: Path | None = option(DIRECTORY, in_recipe=False, help="Write files for benchmark tracking here.")
