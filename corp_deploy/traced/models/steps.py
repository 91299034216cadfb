"""A model taken apart: the segments between the cuts of its program, and what becomes of tokens between them.

The residual stream is [B,N,C] everywhere: inputs in front, their tokens, the channels of a token. Behind a segment the
numbers of tokens and of channels may be others than before it.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from .segments import TokenRows
from .token_merging import TokenMerge, Tokens, sources_of, unmerge_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStep:
    """A segment of a program as rows of tokens. `sites`: those that stand in it."""

    module: TokenRows
    name: str
    sites: tuple[str, ...]

    def passed(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The stream behind it, and what tokens are then compared by where it tells."""
        return self.module.compared(x_BNC, weights_BN)

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return self.passed(x_BNC, weights_BN)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Tokens merged away between two segments, by the stream itself or what lay beside the segment. Where source tokens
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

    def __call__(self, tokens: Tokens, compared_BNX: Tensor | None) -> Tokens:
        if tokens.sources is None or not self.gives_back:
            return Tokens(tokens.x)
        return Tokens(unmerge_tokens(tokens.x, tokens.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStep:
    """The end of a layer behind which one of the model's outputs stands; the stream goes on as it is."""

    name: str


Step = Merge | Unmerge | SegmentStep | OutputStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A residual stream on its way through the steps, with what of the segment behind it tokens are compared by, and
    what it was at the outlets passed.
    """

    tokens: Tokens
    beside_BNX: Tensor | None = None
    kept: tuple[tuple[str, Tokens], ...] = ()

    @classmethod
    def of(cls, x_BNC: Tensor, weights_BN: Tensor | None) -> "StreamState":
        """What enters the first step."""
        return cls(tokens=Tokens(x_BNC, weights_BN))

    def behind(self, step: Step) -> "StreamState":
        """The same behind one more step."""
        x_BNC, weights_BN, sources_BM = self.tokens
        if isinstance(step, OutputStep):
            return replace(self, kept=(*self.kept, (step.name, self.tokens)))
        if isinstance(step, Merge | Unmerge):
            return StreamState(tokens=step(self.tokens, self.beside_BNX), kept=self.kept)
        x_BNC, beside_BNX = step.passed(x_BNC, weights_BN)
        return StreamState(tokens=Tokens(x_BNC, weights_BN, sources_BM), beside_BNX=beside_BNX, kept=self.kept)
