"""How a reduced model is polished: values that refuse what contradicts itself. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from ground.errors import BadInput

PolishName = Literal["none", "layer", "block", "model"]
POLISHES: tuple[PolishName, ...] = get_args(PolishName)
STEPS: Mapping[PolishName, int] = MappingProxyType({"none": 0, "layer": 2, "block": 120, "model": 256})
"""Steps where neither a number of steps nor a time is set: of each layer or block, or of the whole model. Those of
`layer` are sweeps over both of a sublayer's layers, with no gradients of the model.
"""
STEP_SIZES: Mapping[PolishName, float] = MappingProxyType({"none": 0.0, "layer": 0.0, "block": 1e-2, "model": 5e-4})
"""See PolishOptions.step_size. The errors of a block's matrices meet those of no other block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishOptions:
    """What is fitted to what, for how long. `how`: `layer` and `block` fit each reduced sublayer or block to the dense
    stream, `model` the whole to the dense model's outputs and streams.

    `steps` are of each layer or block, or of the model; `time_s` ends all of it early, in seconds. `batch_size` is a
    step's inputs in each process, of which `piece` at a time go forward and back, which bounds memory. `step_size` is
    that of a step relative to the matrix that it changes, and to the error before the polish (a model that lacks little
    is spoilt by what helps one that lacks much); it rises to this over `warm_up` of the way, then falls to nothing in a
    straight line. `averaged` is the half-life of the average of the weights, as a share of the way, that is judged
    beside the weights themselves. `views`: half of the draws of an image are another view of it (see teacher.py). Every
    `held_out_every`-th input, or group of inputs, judges and is not fitted to.
    """

    how: PolishName = "model"
    steps: int | None = None
    time_s: float | None = None
    seed: int = 0
    batch_size: int = 16
    piece: int = 8
    step_size: float | None = None
    warm_up: float = 0.05
    averaged: float = 0.05
    views: bool = True
    held_out_every: int = 8
    cache_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.how not in POLISHES:
            raise BadInput(f"polish: got {self.how!r}, expected one of {', '.join(POLISHES)}")
        if self.how == "none" and (self.steps is not None or self.time_s is not None):
            raise BadInput("steps and time apply to a polish; choose layer, block or model, or leave them out")

    @property
    def largest_step(self) -> float:
        """The step size that was asked for, or what suits the polish."""
        return STEP_SIZES[self.how] if self.step_size is None else self.step_size

    @property
    def most_steps(self) -> int | None:
        """How many steps at most; None where time alone ends it."""
        if self.steps is None and self.time_s is not None:
            return None
        return STEPS[self.how] if self.steps is None else self.steps
