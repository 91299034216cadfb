"""What is polished, on what, and how."""

from dataclasses import dataclass

from torch import Tensor, nn

from calib.distributed import Ranks

from .held_out import ValidationSplit
from .judge import Judge
from .options import PolishOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model and a reduced one that is changed in place, the inputs, and who judges.

    `read`: the tokens of the last stream that count, None for all.
    """

    dense: nn.Module
    model: nn.Module
    inputs: ValidationSplit
    options: PolishOptions
    judge: Judge
    ranks: Ranks
    read: Tensor | None
