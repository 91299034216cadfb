"""A model as steps: the segments between the cuts of its program, and merges and unmerges of tokens between them.

The residual stream is [B,N,C] everywhere: inputs, tokens, channels. A segment may change the numbers of tokens and
channels.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from .segments import TokenRows
from .token_merging import TokenMerge, Tokens, sources_of, unmerge_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStep:
    """A segment of a program on rows of tokens, with the names of its sites."""

    module: TokenRows
    name: str
    sites: tuple[str, ...]

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None, sources_BM: Tensor | None = None) -> Tensor:
        return self.module.compared(Tokens(x_BNC, weights_BN, sources_BM))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """A merge of tokens between two segments, compared by the stream or by what the segment gives beside it.

    Source tokens are tracked from the first merge on.
    """

    name: str
    merge: TokenMerge

    def __call__(self, tokens: Tokens, compared_BNX: Tensor | None) -> Tokens:
        sources_BM = sources_of(tokens.x) if tokens.sources is None else tokens.sources
        compared_BNX = tokens.x if compared_BNX is None else compared_BNX
        return Tokens(*self.merge(tokens.x, tokens.sizes, sources_BM, compared_BNX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmerge:
    """The end of merged tokens; with `gives_back` each source token gets the value of the token that it is in.

    Else the following steps read no tokens by their places.
    """

    name: str
    gives_back: bool

    def __call__(self, tokens: Tokens, compared_BNX: Tensor | None) -> Tokens:
        if tokens.sources is None or not self.gives_back:
            return Tokens(tokens.x)
        return Tokens(unmerge_tokens(tokens.x, tokens.sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputStep:
    """The end of a layer whose stream one of the model's outputs reads; the stream goes on unchanged."""

    name: str


Step = Merge | Unmerge | SegmentStep | OutputStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """A residual stream after some steps.

    `beside_BNX`: what tokens are compared by, from the last segment. `kept`: the tokens at each output step passed.
    """

    tokens: Tokens
    beside_BNX: Tensor | None = None
    kept: tuple[tuple[str, Tokens], ...] = ()

    @classmethod
    def of(cls, x_BNC: Tensor, weights_BN: Tensor | None) -> "StreamState":
        """Build the state in front of the first step."""
        return cls(tokens=Tokens(x_BNC, weights_BN))

    def behind(self, step: Step) -> "StreamState":
        """Return the state after one more step."""
        if isinstance(step, OutputStep):
            return replace(self, kept=(*self.kept, (step.name, self.tokens)))
        if isinstance(step, Merge | Unmerge):
            return StreamState(tokens=step(self.tokens, self.beside_BNX), kept=self.kept)
        x_BNC, beside_BNX = step.module.compared(self.tokens)
        return StreamState(tokens=self.tokens._replace(x=x_BNC), beside_BNX=beside_BNX, kept=self.kept)
