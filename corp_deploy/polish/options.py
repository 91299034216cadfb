"""Options of a polish, which refuse contradictory values. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from ground.errors import BadInput

PolishName = Literal["none", "layer"]
SWEEPS = 2
"""Sweeps over both layers of each sublayer, unless a number or a time is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishOptions:
    """Limits of the fit of each reduced sublayer to the dense stream.

    `steps`: sweeps over its layers; `time_s`: seconds after which all sublayers end early.
    """

    steps: int | None = None
    time_s: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or (self.time_s is not None and self.time_s <= 0.0):
            raise BadInput(f"polish: got {self.steps} sweeps in {self.time_s} s, expected positive numbers")

    @property
    def most_steps(self) -> int | None:
        """The largest number of sweeps; None where only the time ends the polish."""
        return SWEEPS if self.steps is None and self.time_s is None else self.steps
