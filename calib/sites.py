"""Where to listen: the modules of a model whose inputs or outputs are statistics' raw material."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tap:
    """`take` turns the output of `module` into [B,H,N,D]: images, heads, tokens, dims."""

    module: nn.Module
    take: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelTaps:
    """x [B,N,F] is the input of `output`, the MLP's last linear layer."""

    name: str
    output: nn.Linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTaps:
    """q and k as they enter the dot product, before its scale; z [B,N,C] is the input of `output`."""

    name: str
    queries: Tap
    keys: Tap
    output: nn.Module


Site = ChannelTaps | HeadTaps
