"""A model taken apart: the branches that sites stand in, and what lies between them."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One residual branch of a block: x + scale * layer(norm(x)).

    `scale_C` is LayerScale's, or None without one. `read`: the tokens whose results count, None for all; in the last
    block those that the outputs read, elsewhere all. `mixes_tokens`: the layer is told which tokens are there.
    """

    name: str
    norm: nn.Module
    layer: nn.Module
    scale_C: Tensor | None
    read: Tensor | None = None
    mixes_tokens: bool = False

    def run(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """What this layer in the branch's place makes of the residual stream; a token of weight 0 is not there."""
        entering_BNC = self.norm(x_BNC)
        masked = self.mixes_tokens and weights_BN is not None
        out_BNC: Tensor = layer(entering_BNC, weights_BN) if masked else layer(entering_BNC)
        return out_BNC

    def added_by(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """What the branch adds to the residual stream with this layer in place of its own."""
        out_BNC = self.run(layer, x_BNC, weights_BN)
        return out_BNC if self.scale_C is None else out_BNC * self.scale_C

    def through(self, layer: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        """The residual stream behind the branch with this layer in place of its own."""
        return x_BNC + self.added_by(layer, x_BNC, weights_BN)

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        return self.through(self.layer, x_BNC, weights_BN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What is no branch of a model and is run as it is: a norm after a sum, a block that can't be taken apart."""

    module: nn.Module
    mixes_tokens: bool = False
    name: str = ""

    def __call__(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> Tensor:
        masked = self.mixes_tokens and weights_BN is not None
        out_BNC: Tensor = self.module(x_BNC, weights_BN) if masked else self.module(x_BNC)
        return out_BNC


Step = Branch | Passage
