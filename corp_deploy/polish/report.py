"""What a polish did, as values."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The held-out error after so many steps and seconds: of the weights, and of their average."""

    step: int
    seconds: float
    error: float
    averaged: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReport:
    """A part (`model`, a block, a sublayer) with its steps and its held-out relative error before and after; after is
    never more, since the start is kept where nothing was better.
    """

    part: str
    steps: int
    seconds: float
    error_before: float
    error: float
    curve: tuple[Judged, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishReport:
    """How a model was polished, and the held-out relative error of its outputs before and after."""

    how: str
    fitted: int
    held_out: int
    batch_size: int
    seed: int
    error_before: float
    error: float
    parts: tuple[PartReport, ...]

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    @property
    def by_gradients(self) -> bool:
        """Layers are fitted by Gauss-Newton steps and regressions."""
        return self.how != "layer"

    @property
    def line(self) -> str:
        """In one sentence."""
        seconds = sum(part.seconds for part in self.parts)
        what = {"model": "whole", "block": f"in {len(self.parts)} blocks", "layer": f"in {len(self.parts)} layers"}
        how, unit = ("by gradients", "steps") if self.by_gradients else ("by least squares", "sweeps")
        return (
            f"polished {what.get(self.how, self.how)} {how}, without labels: {self.steps} {unit} in "
            f"{seconds:.0f} s, outputs' error on {self.held_out} inputs held out "
            f"{self.error_before:.4f} -> {self.error:.4f}"
        )

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "gradients": self.by_gradients}
