"""The residual streams of the dense and of the reduced model, carried side by side through the blocks.

Legend: B images of a piece, N tokens, M source tokens where some are merged, C channels, X dimensions compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.inputs import InputSet, to_device
from corp_deploy.families import traced_model
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.steps import Merge, Unmerge
from corp_deploy.traced.models.token_merging import Tokens

Embedded = tuple[Tensor, Tensor | None]
"""The residual stream [B,N,C] of some inputs, and which of its tokens are there [B,N]: 1, or 0 for padding."""


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both streams [B,N,C] of a few inputs; those `held_out` choose how far to trust a fit to the others.

    `weights_BN` tell which tokens are there, None for all. Where tokens are merged the reduced stream has fewer:
    `sizes_BN` dense tokens stand in each, the dense token m in number `sources_BM` of them.
    """

    dense: Tensor
    reduced: Tensor
    held_out: bool
    weights_BN: Tensor | None = None
    sizes_BN: Tensor | None = None
    sources_BM: Tensor | None = None
    beside_BNX: Tensor | None = None

    @property
    def present_BN(self) -> Tensor | None:
        """How much each token of the reduced stream counts, None for all alike."""
        return self.weights_BN if self.sizes_BN is None else self.sizes_BN

    @property
    def target(self) -> Tensor:
        """What the reduced stream should be: each token the mean of the dense ones that stand in it."""
        if self.sources_BM is None:
            return self.dense
        return mean_of_sources(self.dense, self.sources_BM, self.reduced.shape[1])

    def advance(self, step: Merge | Unmerge) -> None:
        """The reduced stream through a merge; the dense one is never merged."""
        tokens = Tokens(self.reduced, self.present_BN, self.sources_BM)
        self.reduced, self.sizes_BN, self.sources_BM = step(tokens, self.beside_BNX)
        self.beside_BNX = None

    def rows(self, x_BNC: Tensor, tokens: Tensor | None = None) -> Tensor:
        """What counts in sums over the reduced stream's tokens, among these tokens (None: all): [B,N,C], or one row of
        tokens [1,X,C] where some are not there.
        """
        x_BNC = x_BNC if tokens is None else x_BNC[:, tokens]
        if self.weights_BN is None or (tokens is None and x_BNC.shape[1] != self.weights_BN.shape[1]):
            return x_BNC
        weights_BN = self.weights_BN if tokens is None else self.weights_BN[:, tokens]
        return x_BNC[weights_BN > 0.0].unsqueeze(0)

    def row_weights(self, tokens: Tensor | None = None) -> Tensor | None:
        """By how much each of those rows counts, None for all alike."""
        return self.sizes_BN if self.sizes_BN is None or tokens is None else self.sizes_BN[:, tokens]


def mean_of_sources(x_BMC: Tensor, sources_BM: Tensor, count: int) -> Tensor:
    """For each of `count` tokens the mean of those of x whose source it is; sources below 0 are of none."""
    is_in_BMN = (sources_BM.unsqueeze(-1) == torch.arange(count, device=x_BMC.device)).to(x_BMC.dtype)
    return (is_in_BMN.transpose(1, 2) @ x_BMC) / is_in_BMN.sum(dim=1).unsqueeze(-1)


def embedded(model: nn.Module, inputs: InputSet, batch_size: int) -> Iterator[Embedded]:
    """The first residual stream of every input, where the model is."""
    for batch in inputs.batches(batch_size):
        here = to_device(batch, device(model))
        yield traced_model.embedded(model, here), traced_model.token_weights(model, here)
