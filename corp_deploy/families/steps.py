"""A model taken apart: the branches that sites stand in, and what lies between them.

The residual stream is [B,N,C] everywhere: inputs in front, their tokens, the channels of a token. Behind a passage the
numbers of tokens and of channels may be others than before it. What a layer wants otherwise (maps) is made of
that within its step and put back. Between a fork and its join the stream is [B,N,2C]: the channels that
branches side by side add to, then those that all of them read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .head_attention import Beside
from .token_merging import TokenMerge, Tokens, sources_of, unmerged


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One residual branch of a block: x + scale * layer(norm(x)), or where a norm is `behind`, its own being none,
    x + scale * behind(layer(x)). With a `shortcut` that of x stands in the place of the x that is added to.

    `scale_C` is LayerScale's, or None without one. `read`: the tokens whose results count, None for all; in the last
    block those that the outputs read, elsewhere all. `mixes_tokens`: the layer is told which tokens are there.
    `shortcut`: what makes of the stream what the layer's outputs are added to, where that has other tokens or channels.
    `forked`: it stands between a fork and its join.
    """

    name: str
    norm: nn.Module
    layer: nn.Module
    scale_C: Tensor | None
    read: Tensor | None = None
    mixes_tokens: bool = False
    beside: Beside | None = None
    behind: nn.LayerNorm | None = None
    forked: bool = False
    shortcut: nn.Module | None = None

    def __post_init__(self) -> None:
        plain = self.beside is None and not self.mixes_tokens
        assert plain or (self.behind is None and not self.forked), self.name
        assert self.shortcut is None or not self.forked, self.name

    @property
    def gain_C(self) -> Tensor | None:
        """By what each channel that the layer gives enters the stream, None for 1; that of a norm behind it is divided
        by a token's own deviation.
        """
        if self.behind is None or self.behind.weight is None:
            return self.scale_C
        weight_C = self.behind.weight.detach()
        return weight_C if self.scale_C is None else self.scale_C * weight_C

    def added_to(self, x_BNC: Tensor) -> Tensor:
        """The channels of a stream that the branch adds to."""
        return x_BNC.chunk(2, dim=-1)[0] if self.forked else x_BNC

    def rows(self, x_BNC: Tensor) -> Tensor:
        """A stream as what the layer gives is added to it [B,N,C]."""
        assert x_BNC.ndim == 3, (self.name, x_BNC.shape)
        return self.added_to(x_BNC)

    def carried(self, x_BNC: Tensor) -> Tensor:
        """What of the stream the layer's outputs are added to."""
        return x_BNC if self.shortcut is None else self.shortcut(x_BNC)

    def entering(self, x_BNC: Tensor) -> Tensor:
        """What of the stream enters the layer; the norm may mix tokens."""
        entering_BNC: Tensor = self.norm(x_BNC.chunk(2, dim=-1)[1] if self.forked else x_BNC)
        return entering_BNC

    def run(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """What this layer in the branch's place makes of the residual stream; a token of weight 0 is not there."""
        entering_BNC = self.entering(x_BNC)
        masked = self.mixes_tokens and weights_BN is not None
        out_BNC: Tensor = layer(entering_BNC, weights_BN) if masked else layer(entering_BNC)
        return out_BNC

    def added(self, given_BNC: Tensor) -> Tensor:
        """What is added to the residual stream where the layer gives so much."""
        out_BNC: Tensor = given_BNC if self.behind is None else self.behind(given_BNC)
        return out_BNC if self.scale_C is None else out_BNC * self.scale_C

    def plus(self, x_BNC: Tensor, given_BNC: Tensor) -> Tensor:
        """The residual stream behind the branch where the layer gives so much."""
        added_BNC = self.added(given_BNC)
        if not self.forked:
            return self.carried(x_BNC) + added_BNC
        to_BNC, read_BNC = x_BNC.chunk(2, dim=-1)
        return torch.cat((to_BNC + added_BNC, read_BNC), dim=-1)

    def through(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """The residual stream behind the branch with this layer in place of its own."""
        return self.plus(x_BNC, self.run(layer, x_BNC, weights_BN))

    def passed(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`through`, and what tokens are then compared by where that is of the layer."""
        if self.beside is None:
            return self.through(layer, x_BNC, weights_BN), None
        given_BNC, compared_BNX = layer(self.norm(x_BNC), weights_BN, beside=self.beside)
        return self.plus(x_BNC, given_BNC), compared_BNX

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return self.through(self.layer, x_BNC, weights_BN)


class Nothing(nn.Module):
    """Zeros for tokens [B,N,C], as many of them and of their channels as are asked for: what a layer's results are
    added to where that is nothing.
    """

    def __init__(self, tokens: int | None, channels: int) -> None:
        """`tokens`: None for as many as there are."""
        super().__init__()
        self.tokens, self.channels = tokens, channels

    def forward(self, x_BNC: Tensor) -> Tensor:
        return x_BNC.new_zeros(x_BNC.shape[0], self.tokens or x_BNC.shape[1], self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What is no branch of a model and is run as it is: a norm after a sum, a block that can't be taken apart.

    `sites`: those inside a block that has all of its sites in this one step. `compared`: what gives beside what the
    module does that which tokens are then compared by.
    """

    module: nn.Module
    mixes_tokens: bool = False
    name: str = ""
    sites: tuple[str, ...] = ()
    compared: Callable[..., tuple[Tensor, Tensor | None]] | None = None

    def passed(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The stream behind it, and what tokens are then compared by where it tells."""
        entering = (x_BNC, weights_BN) if self.mixes_tokens and weights_BN is not None else (x_BNC,)
        return (self.module(*entering), None) if self.compared is None else self.compared(*entering)

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return self.passed(x_BNC, weights_BN)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where several branches read one stream; `name` is their block's. [B,N,C] -> [B,N,2C]."""

    name: str

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return torch.cat((x_BNC, x_BNC), dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The end of such branches: what all of them have added to. [B,N,2C] -> [B,N,C]."""

    name: str

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return x_BNC.chunk(2, dim=-1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Tokens merged away between two branches, by the stream itself or what lay beside the branch. Where source tokens
    are is known from the first merge on.
    """

    name: str
    merge: TokenMerge

    def __call__(self, tokens: Tokens, compared_BNX: Tensor | None) -> Tokens:
        sources_BM = sources_of(tokens.x) if tokens.sources is None else tokens.sources
        compared_BNX = tokens.x if compared_BNX is None else compared_BNX
        return Tokens(*self.merge(tokens.x, tokens.sizes, sources_BM, compared_BNX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmerge:
    """Where merged tokens end: each source token has the value of the one that it is in, or what follows is of no
    tokens as they were.
    """

    name: str
    gives_back: bool

    def __call__(self, tokens: Tokens) -> Tokens:
        if tokens.sources is None or not self.gives_back:
            return Tokens(tokens.x)
        return Tokens(unmerged(tokens.x, tokens.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlet:
    """The end of a layer behind which one of the model's outputs stands; the stream goes on as it is."""

    name: str

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return x_BNC


def through(step: Branch | Passage, x_BNC: Tensor, weights_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The stream behind a step as it is, and what tokens are then compared by where it tells."""
    if isinstance(step, Branch):
        return step.passed(step.layer, x_BNC, weights_BN)
    return step.passed(x_BNC, weights_BN)


Step = Branch | Fork | Join | Merge | Unmerge | Passage | Outlet


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A residual stream on its way through the steps, with what of the branch behind it tokens are compared by, and
    what it was at the outlets passed.
    """

    tokens: Tokens
    beside_BNX: Tensor | None = None
    kept: tuple[tuple[str, Tokens], ...] = ()

    @classmethod
    def of(cls, x_BNC: Tensor, weights_BN: Tensor | None) -> "Walk":
        """What enters the first step."""
        return cls(tokens=Tokens(x_BNC, weights_BN))

    def behind(self, step: Step) -> "Walk":
        """The same behind one more step."""
        x_BNC, weights_BN, sources_BM = self.tokens
        if isinstance(step, Outlet):
            return replace(self, kept=(*self.kept, (step.name, self.tokens)))
        if isinstance(step, Merge):
            return Walk(tokens=step(self.tokens, self.beside_BNX), kept=self.kept)
        if isinstance(step, Unmerge):
            return Walk(tokens=step(self.tokens), kept=self.kept)
        if isinstance(step, Branch | Passage):
            x_BNC, beside_BNX = through(step, x_BNC, weights_BN)
            return Walk(tokens=Tokens(x_BNC, weights_BN, sources_BM), beside_BNX=beside_BNX, kept=self.kept)
        return Walk(tokens=Tokens(step(x_BNC, weights_BN), weights_BN, sources_BM), kept=self.kept)
