"""Options of `gate`. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ground.errors import BadInput

from .option import Record, option
from .proof import confidence_option
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

    def refuse_ignored(self, options: Mapping[str, Any]) -> None:
        if "confidence" in options and not self.rules:
            raise BadInput("--confidence is of the intervals that rules are judged by: give one with --fail-if")
