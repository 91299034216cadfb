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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishOptions:
    """What is fitted to what, for how long. `how`: `layer` and `block` fit each reduced sublayer or block to the dense
    stream, `model` the whole to the dense model's outputs and streams.

    `steps` are of each layer or block, or of the model; `time_s` ends all of it early, in seconds. `batch_size` is a
    step's inputs in each process, of which `piece` at a time go forward and back, which bounds memory. `step_size` is
    that of a step relative to the matrix that it changes, at its largest; it rises over `warm_up` of the way, then
    falls to nothing in a straight line. `averaged` is the half-life of the average of the weights, as a share of the
    way, that is judged beside the weights themselves. `views`: a model is fitted to another view of an image at each
    draw (see views.py), not to the image itself. Every `held_out_every`-th input, or group of inputs, judges and is not
    fitted to.
    """

    how: PolishName = "model"
    steps: int | None = None
    time_s: float | None = None
    seed: int = 0
    batch_size: int = 16
    piece: int = 8
    step_size: float = 3e-4
    warm_up: float = 0.05
    averaged: float = 0.05
    views: bool = True
    held_out_every: int = 8
    cache_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.how not in POLISHES:
            raise BadInput(f"polish: got {self.how!r}, expected one of {', '.join(POLISHES)}")
        if self.how == "none" and (self.steps is not None or self.time_s is not None):
            raise BadInput("steps and time are of a polish; ask for layer, block or model, or leave them away")

    @property
    def most_steps(self) -> int | None:
        """How many steps at most; None where time alone ends it."""
        if self.steps is None and self.time_s is not None:
            return None
        return STEPS[self.how] if self.steps is None else self.steps
