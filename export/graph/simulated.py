"""What plain quantisation does to a torch model: the yardstick that quantised graphs are held against.

Every linear layer and convolution reads rounded inputs and rounded weights, be it a module or a call of a traced
program: the largest value seen is the end of the range, nothing is balanced and nothing clipped. Sums and all between
the layers stay float32. As in graphs, a layer that gives a single number stays as it is.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .number_format import FORMATS, NumberFormat

_NAMES = ("linear", "conv1d", "conv2d", "conv3d")
LAYERS = frozenset(
    [getattr(functional, name) for name in _NAMES] + [getattr(torch.ops.aten, name).default for name in _NAMES]
)
Run = Callable[[nn.Module], object]


def simulated(model: nn.Module, precision: str, run: Run) -> nn.Module:
    """A copy of `model` on the CPU that rounds. `run` runs it, or a copy of it, on the inputs that ranges are of."""
    ranges = _Ranges(form=FORMATS[precision])
    own = Simulated(copy.deepcopy(model).cpu().float().eval(), ranges)
    with torch.inference_mode():
        run(own)
    ranges.is_watching = False
    return own


@dataclass(slots=True, kw_only=True)
class _Ranges:
    """The largest inputs of layers in the order in which they are called, and their rounded weights; copies share
    them.
    """

    form: NumberFormat
    is_watching: bool = True
    ends: dict[int, float] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Ranges":
        return self


class Simulated(nn.Module):
    """A model whose layers are watched, then round."""

    def __init__(self, model: nn.Module, ranges: _Ranges) -> None:
        super().__init__()
        self.model, self.ranges = model, ranges

    def forward(self, *args: Any) -> Any:
        with _Layers(self.ranges):
            return self.model(*args)


class _Layers(TorchFunctionMode):
    def __init__(self, ranges: _Ranges) -> None:
        super().__init__()
        self.ranges, self.count = ranges, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LAYERS or len(args) < 2 or len(args[1]) == 1:
            return func(*args, **(kwargs or {}))
        number, ranges, form = self.count, self.ranges, self.ranges.form
        self.count += 1
        x, weight, *others = args
        if ranges.is_watching:
            ranges.ends[number] = max(ranges.ends.get(number, 0.0), float(x.detach().abs().max()))
            return func(*args, **(kwargs or {}))
        if number not in ranges.weights:
            ranges.weights[number] = _rounded_weight(weight, form)
        x = _rounded(x, form, max(ranges.ends[number] / form.largest, 2.0**-100))
        return func(x, ranges.weights[number], *others, **(kwargs or {}))


def _rounded(x: Tensor, form: NumberFormat, scale: Any) -> Tensor:
    return torch.from_numpy(form.rounded(x.detach().numpy(), scale))


def _rounded_weight(weight: Tensor, form: NumberFormat) -> Tensor:
    values = weight.detach().numpy()
    others = tuple(range(1, values.ndim))
    return _rounded(weight, form, np.maximum(np.abs(values).max(axis=others, keepdims=True) / form.largest, 2.0**-100))
