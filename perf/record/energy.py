"""Recorded energy: joules of a sensor's counter over blocks of several seconds, and over pauses of the idle machine."""

import math
from dataclasses import dataclass

from ground.errors import BadInput

from .states import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyBlock(Block):
    """The rise of the counter over a block between two of its updates; a block without images is a pause."""

    seconds: float
    joules: float
    images: int

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf or not 0 <= self.joules < math.inf or self.images < 0:
            raise BadInput(
                f"a block of energy needs seconds, joules and images from 0 on; {self.subject}, round {self.round} has "
                f"{self.seconds}, {self.joules} and {self.images}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyRun:
    """Energy at one batch size: pauses before and after, and blocks of both subjects and of the reference again."""

    sensor: str
    period_s: float
    idle: tuple[EnergyBlock, ...]
    blocks: tuple[EnergyBlock, ...]

    def __post_init__(self) -> None:
        if not self.idle or any(block.images for block in self.idle) or not all(b.images for b in self.blocks):
            raise BadInput(
                f"{self.sensor}: a measurement of energy needs pauses without images, and blocks with images"
            )
