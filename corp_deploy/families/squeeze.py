"""Squeeze and excitation (arXiv 1709.01507): channels scaled by what all channels' means over the map say.

Legend: B images, C channels, R of the squeeze, K kept channels.
"""

import torch
from torch import Tensor, nn

from .modules import fill_, linear


class SqueezeExcite(nn.Module):
    """x * gate(expand(act(reduce(mean over the map)))) of maps [B,C,H,W]."""

    def __init__(self, reduce: nn.Linear, act: nn.Module, expand: nn.Linear, gate: nn.Module) -> None:
        super().__init__()
        self.reduce, self.act, self.expand, self.gate = reduce, act, expand, gate

    def forward(self, x: Tensor) -> Tensor:
        scale_BC = self.gate(self.expand(self.act(self.reduce(x.mean(dim=(2, 3))))))
        out: Tensor = x * scale_BC[:, :, None, None]
        return out

    @property
    def channels(self) -> int:
        return self.expand.out_features

    def macs(self, channels: int) -> int:
        """Of so many channels."""
        return 2 * channels * self.reduce.out_features

    def empty(self, channels: int) -> "SqueezeExcite":
        """Of another width, its weights not yet set."""
        where = {"device": self.reduce.weight.device, "dtype": self.reduce.weight.dtype}
        squeeze = self.reduce.out_features
        reduce = linear(channels, squeeze, bias=True, **where)
        expand = linear(squeeze, channels, bias=self.expand.bias is not None, **where)
        return SqueezeExcite(reduce, self.act, expand, self.gate)

    @torch.no_grad()
    def narrowed(self, kept_K: Tensor, weight_RK: Tensor, bias_R: Tensor) -> "SqueezeExcite":
        """Of these channels, which the squeeze reads by these weights."""
        new = self.empty(len(kept_K))
        fill_(new.reduce, weight_RK, bias_R)
        fill_(new.expand, self.expand.weight[kept_K], None if self.expand.bias is None else self.expand.bias[kept_K])
        return new.requires_grad_(self.reduce.weight.requires_grad)
