"""Norms of maps over groups of their channels and all positions (arXiv 1803.08494), of which whole groups may go."""

from typing import Any

import torch
from torch import Tensor, nn


class ChannelNorm(nn.GroupNorm):
    """A group norm of maps [B,C,H,W]; what stays of it does to its channels what it did before."""

    @property
    def unit(self) -> int:
        """Channels of a group."""
        return self.num_channels // self.num_groups

    def macs(self, channels: int) -> int:
        """Norms have no products."""
        return 0

    def empty(self, channels: int) -> "ChannelNorm":
        """Of so many channels, its weights not yet set."""
        assert channels % self.unit == 0, (channels, self.unit)
        where: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        return ChannelNorm(channels // self.unit, channels, eps=self.eps, **where)

    @torch.no_grad()
    def narrowed(self, kept_K: Tensor) -> "ChannelNorm":
        """Of these channels, whole groups."""
        new = self.empty(len(kept_K))
        new.weight.copy_(self.weight[kept_K])
        new.bias.copy_(self.bias[kept_K])
        return new.requires_grad_(self.weight.requires_grad)


@torch.no_grad()
def channel_norm(norm: nn.GroupNorm) -> ChannelNorm:
    """A copy of a group norm with weights by channel."""
    where: dict[str, Any] = {"device": norm.weight.device, "dtype": norm.weight.dtype}
    new = ChannelNorm(norm.num_groups, norm.num_channels, eps=norm.eps, **where)
    new.weight.copy_(norm.weight)
    new.bias.copy_(norm.bias)
    return new.requires_grad_(norm.weight.requires_grad)
