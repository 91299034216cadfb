"""Convolutions of maps of one size, with the norm that stood behind them in their weights.

Legend: B images, C channels, H and W of a map, O outputs, I inputs of a group.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .maps import Grid

Edges = tuple[int, int, int, int]
"""Zeros put around a map: left, right, top, bottom."""


class Convolution(nn.Conv2d):
    """A convolution with a bias that gives maps of one grid; where zeros are put around unevenly `edges` say how, and
    there is no other padding.
    """

    def __init__(self, inputs: int, outputs: int, like: nn.Conv2d, *, groups: int, edges: Edges | None, grid: Grid):
        """In all else like another; its weights are not yet set."""
        old: Any = like  # whose sizes torch types as tuples of any length
        super().__init__(
            inputs,
            outputs,
            old.kernel_size,
            stride=old.stride,
            padding=0 if edges else old.padding,
            dilation=old.dilation,
            groups=groups,
            device=old.weight.device,
            dtype=old.weight.dtype,
        )
        self.edges, self.grid = edges, grid

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.edges is None else functional.pad(x, self.edges))

    @property
    def taps(self) -> int:
        """Places of the kernel."""
        return self.weight[0, 0].numel()

    @property
    def positions(self) -> int:
        """Of the map that it gives."""
        return self.grid[0] * self.grid[1]

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is convolved by itself."""
        return self.groups == self.in_channels == self.out_channels and self.groups > 1

    def empty(self, inputs: int, outputs: int) -> "Convolution":
        """Of other channels, its weights not yet set; groups stay, but for one of each channel by itself."""
        groups = outputs if self.is_depthwise else self.groups
        return Convolution(inputs, outputs, self, groups=groups, edges=self.edges, grid=self.grid)

    @torch.no_grad()
    def fill_(self, weight_OIHW: Tensor, bias_O: Tensor) -> "Convolution":
        """Set a new convolution: where float64 results become the model's type."""
        self.weight.copy_(weight_OIHW)
        assert self.bias is not None, self
        self.bias.copy_(bias_O)
        return self


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d | None, grid: Grid, edges: Edges | None = None) -> Convolution:
    """A convolution and the batch norm behind it, in evaluation, as one: w' = w gamma / sqrt(v + eps), b' = beta +
    (b - mu) gamma / sqrt(v + eps). `edges` where its padding is not what it says of itself.
    """
    own = Convolution(conv.in_channels, conv.out_channels, conv, groups=conv.groups, edges=edges, grid=grid)
    weight_OIHW = conv.weight.detach().double()
    bias_O = weight_OIHW.new_zeros(len(weight_OIHW)) if conv.bias is None else conv.bias.detach().double()
    if norm is not None:
        assert norm.running_mean is not None, norm
        assert norm.running_var is not None, norm
        scale_O = (norm.running_var.double() + norm.eps).rsqrt()
        if norm.weight is not None:
            scale_O = scale_O * norm.weight.detach().double()
        bias_O = (bias_O - norm.running_mean.double()) * scale_O
        if norm.bias is not None:
            bias_O = bias_O + norm.bias.detach().double()
        weight_OIHW = weight_OIHW * scale_O.view(-1, 1, 1, 1)
    return own.fill_(weight_OIHW, bias_O).requires_grad_(conv.weight.requires_grad)
