"""Where to listen: the modules of a model whose inputs or outputs are statistics' raw material.

Shapes: B inputs, W windows of an input, H heads, N tokens, D dims, F and C channels. The batch is in front of every
activation, whatever a model does inside: windows are an axis of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ground.errors import BadInput

Role = Literal["x", "q", "k", "z"]
SiteKind = Literal["mlp", "attention"]
"""As files name it."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tap:
    """`take` turns the output of `module` into [B,H,N,D], [B,W,H,N,D] where tokens see those of their window alone."""

    module: nn.Module
    take: Callable[[Tensor], Tensor]

    def listen(self, site: str, hear: Callable[[Tensor], None]) -> RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = self.take(output)
            if x.ndim not in (4, 5):
                raise BadInput(
                    f"{site}: its tap gave {list(x.shape)}, expected [batch, heads, tokens, dims] or [batch, windows, "
                    "heads, tokens, dims]"
                )
            hear(x)

        return self.module.register_forward_hook(hook)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputTap:
    """What enters `module`, as [B,N,F]."""

    module: nn.Module

    def listen(self, site: str, hear: Callable[[Tensor], None]) -> RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hear(_tokens_from(site, inputs[0], self.module))

        return self.module.register_forward_pre_hook(hook)


def _tokens_from(site: str, x: Tensor, module: nn.Module) -> Tensor:
    """[B,F], [B,N,F], or [B,...,F] into a linear layer -> [B,N,F]: what lies between batch and channels is tokens."""
    if isinstance(module, CONVOLUTIONS) or (x.ndim > 3 and not isinstance(module, nn.Linear)):
        raise BadInput(
            f"{site}: {type(module).__name__} takes {list(x.shape)}, a feature map [batch, channels, ...]; there are "
            "statistics of tokens [batch, tokens, channels] and of vectors [batch, channels] alone: leave this site out"
        )
    if x.ndim < 2:
        raise BadInput(
            f"{site}: got an input of shape {list(x.shape)}, expected [batch, tokens, channels] or [batch, channels]"
        )
    return x[:, None] if x.ndim == 2 else x.flatten(1, -2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChannelTaps:
    """x [B,N,F] is the input of `output`, the MLP's last linear layer. `merge`: see HeadTaps."""

    kind: ClassVar[SiteKind] = "mlp"
    slots_WN: ClassVar[Tensor | None] = None
    name: str
    output: nn.Linear
    merge: nn.Module | None = None

    @property
    def summed_width(self) -> int:
        """Channels of x, whose products are summed in one piece."""
        return self.output.in_features

    @property
    def taps(self) -> Mapping[Role, Tap | InputTap]:
        """What one forward pass must bring, each exactly once."""
        return {"x": InputTap(module=self.output)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTaps:
    """q and k as they enter the dot product, before its scale; z [B,N,C] is the input of `output`.

    `merge`: a module that merged tokens before they came here; the second of its outputs [B,N] is how many stand in
    each, by which they are weighted, or None. `slots_WN`: 1 for what of q and k in windows [B,W,H,N,D] is there, 0 for
    what isn't; None for all.
    """

    kind: ClassVar[SiteKind] = "attention"
    name: str
    queries: Tap
    keys: Tap
    output: nn.Module
    merge: nn.Module | None = None
    slots_WN: Tensor | None = None

    @property
    def summed_width(self) -> int:
        """There is no x."""
        return 0

    @property
    def taps(self) -> Mapping[Role, Tap | InputTap]:
        """What one forward pass must bring, each exactly once."""
        return {"q": self.queries, "k": self.keys, "z": InputTap(module=self.output)}


Site = ChannelTaps | HeadTaps
