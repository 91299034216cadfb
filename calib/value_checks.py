"""What no sums can be: refused, the field named."""

import math

import torch
from torch import Tensor

from ground.errors import BadInput


def refuse_shape(owner: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Raises BadInput unless value is float64 of that shape."""
    if value.dtype != torch.float64 or tuple(value.shape) != shape:
        raise BadInput(f"{owner}.{name}: got {value.dtype} {list(value.shape)}, expected float64 {list(shape)}")


def refuse_count(owner: str, name: str, value: int) -> None:
    """Raises BadInput for a count below 1."""
    if value < 1:
        raise BadInput(f"{owner}.{name}: got {value}, expected at least 1")


def refuse_tokens(owner: str, value: float, name: str = "tokens") -> None:
    """Raises BadInput unless weights add up to something finite above 0."""
    if not 0 < value < math.inf:
        raise BadInput(f"{owner}.{name}: got {value}, expected more than 0")


def refuse_eps(owner: str, value: float) -> None:
    """Raises BadInput for a bound below 0, or NaN."""
    if not value >= 0:
        raise BadInput(f"{owner}.eps: got {value}, expected zero or more")
