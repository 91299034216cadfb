"""A convolution of each channel by itself, within an MLP of tokens.

Legend: B inputs, N = H * W tokens, F channels, K of them kept.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .maps import Grid, map_from_tokens, tokens_from_map


def convolution(like: nn.Conv2d, width: int, *, bias: bool) -> nn.Conv2d:
    """One of so many channels, its weights not yet set, in all else like another."""
    old: Any = like  # whose sizes torch types as tuples of any length
    where = {"device": old.weight.device, "dtype": old.weight.dtype}
    return nn.Conv2d(width, width, old.kernel_size, padding=old.padding, groups=width, bias=bias, **where)


class Depthwise(nn.Module):
    """[B,N,F] -> [B,N,F], tokens row by row of a map that keeps its size."""

    def __init__(self, conv: nn.Conv2d, grid: Grid) -> None:
        """`conv`: one group a channel."""
        super().__init__()
        assert conv.groups == conv.in_channels == conv.out_channels, conv
        self.conv, self.grid = conv, grid

    @property
    def channels(self) -> int:
        return self.conv.out_channels

    @property
    def taps(self) -> int:
        """Products of one output."""
        return self.conv.weight[0].numel()

    def parameters_of(self, width: int) -> int:
        """Of so many channels."""
        return width * (self.taps + (self.conv.bias is not None))

    def forward(self, x: Tensor) -> Tensor:
        return tokens_from_map(self.conv(map_from_tokens(x, self.grid)))

    def empty(self, width: int) -> "Depthwise":
        """Of another width, its weights not yet set."""
        return Depthwise(convolution(self.conv, width, bias=self.conv.bias is not None), self.grid)

    @torch.no_grad()
    def kept(self, kept_K: Tensor) -> "Depthwise":
        """These channels alone."""
        narrower = self.empty(len(kept_K))
        narrower.conv.weight.copy_(self.conv.weight[kept_K])
        if self.conv.bias is not None:
            narrower.conv.bias.copy_(self.conv.bias[kept_K])  # type: ignore[union-attr]
        return narrower


class DepthwiseMlp(nn.Module):
    """fc2(act2(between(act1(fc1(x))))) of tokens [B,N,C]."""

    def __init__(self, fc1: nn.Linear, act1: nn.Module, between: nn.Module, act2: nn.Module, fc2: nn.Linear) -> None:
        super().__init__()
        self.fc1, self.act1, self.between, self.act2, self.fc2 = fc1, act1, between, act2, fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act2(self.between(self.act1(self.fc1(x)))))
        return out
