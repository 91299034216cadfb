"""What a reduced model may lose, as people write it: `error 0.05`, `agreement 0.98`, `accuracy -0.5`. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from ground.errors import BadInput
from ground.quantity import Real, quoted

Measure = Literal["error", "agreement", "accuracy"]
# Outputs of nothing but zeros have an error of 1: a larger one asks for nothing. So do the other ends left open.
BOUNDS: dict[Measure, Real] = {
    "error": Real(low=0.0, high=1.0, low_open=True, high_open=True),
    "agreement": Real(low=0.0, high=1.0, low_open=True, noun="a share"),
    "accuracy": Real(low=-100.0, high=0.0, low_open=True, noun="a change in points"),
}
EXPECTED = "'error 0.05' (largest relative error), 'agreement 0.98' (least share) or 'accuracy -0.5' (points lost)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A largest relative error, a least agreement with the dense model, or a least change of accuracy in points.

    Raises BadInput for a value that every model or none could meet.
    """

    measure: Measure
    value: float

    def __post_init__(self) -> None:
        bounds = BOUNDS[self.measure]
        if not bounds.holds(self.value):
            raise BadInput(f"'{self.measure} {self.value:.15g}': expected {self.measure} and {bounds}")

    def __str__(self) -> str:
        return f"{self.measure} {self.value:.15g}"

    def holds(self, value: float) -> bool:
        return value <= self.value if self.measure == "error" else value >= self.value

    def better(self, one: float, other: float) -> bool:
        return one < other if self.measure == "error" else one > other


def limit_from_text(text: str) -> Limit:
    """Raises BadInput for anything else than a measure and a number that means something."""
    words = text.split()
    measure = next((name for name in get_args(Measure) if len(words) == 2 and words[0] == name), None)
    if measure is None:
        raise BadInput(f"{quoted(text)}: expected {EXPECTED}")
    try:
        return Limit(measure=measure, value=Real(low=-100.0, high=100.0).from_text(words[1]))
    except BadInput:
        raise BadInput(f"{quoted(text)}: expected {measure} and {BOUNDS[measure]}, as in {EXPECTED}") from None
