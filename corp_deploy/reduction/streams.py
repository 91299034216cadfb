"""The residual streams of the dense and of the reduced model, carried side by side through the blocks.

Legend: B images of a piece, N tokens, C channels.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.input_set import InputSet
from calib.inputs import moved
from corp_deploy.families.family import family_of
from corp_deploy.families.modules import device
from ground.errors import BadInput

HELD_OUT_EVERY = 4
CPU_TOKENS = 2048  # of a piece: its activations stay in a CPU's caches, and products over it are long enough
Step = Callable[[Tensor, Tensor | None], Tensor]
Embedded = tuple[Tensor, Tensor | None]
"""The residual stream [B,N,C] of some inputs, and which of its tokens are there [B,N]: 1, or 0 for padding."""


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both streams [B,N,C] of a few inputs; those `held_out` choose how far to trust a fit to the others.

    `weights_BN` tell which tokens are there, None for all.
    """

    dense: Tensor
    reduced: Tensor
    held_out: bool
    weights_BN: Tensor | None = None

    def advance(self, step: Step) -> None:
        """Both through the same step; once, as long as they are one."""
        same = self.reduced is self.dense
        self.dense = step(self.dense, self.weights_BN)
        self.reduced = self.dense if same else step(self.reduced, self.weights_BN)

    def rows(self, x_BNC: Tensor, tokens: Tensor | None = None) -> Tensor:
        """What counts in sums over tokens, among these tokens (None: all): [B,N,C], or one row of tokens [1,X,C] where
        some are not there.
        """
        x_BNC = x_BNC if tokens is None else x_BNC[:, tokens]
        if self.weights_BN is None:
            return x_BNC
        weights_BN = self.weights_BN if tokens is None else self.weights_BN[:, tokens]
        return x_BNC[weights_BN > 0.0].unsqueeze(0)


def _pieces(x_BNC: Tensor, weights_BN: Tensor | None, held_out: bool) -> Iterator[Pair]:
    size = max(1, CPU_TOKENS // x_BNC.shape[1]) if x_BNC.device.type == "cpu" else max(1, len(x_BNC))
    for start in range(0, len(x_BNC), size):
        piece_BNC = x_BNC[start : start + size]
        weights = None if weights_BN is None else weights_BN[start : start + size]
        yield Pair(dense=piece_BNC, reduced=piece_BNC, held_out=held_out, weights_BN=weights)


class Streams:
    """Both streams of every image, a few images at a time, float32, where they come from.

    Memory: 2 * images * N * C * 4 bytes, so 2.4 GB for 2,000 images of a model with 197 tokens of 768 channels.
    """

    def __init__(self, embedded: Iterable[Embedded], *, held_out_every: int = HELD_OUT_EVERY) -> None:
        """`embedded`: what enters the first block, batch by batch; each `held_out_every`-th image is held out.

        Raises BadInput for too few images.
        """
        self.pairs: list[Pair] = []
        seen = 0
        for x_BNC, weights_BN in embedded:
            positions_B = torch.arange(seen, seen + len(x_BNC), device=x_BNC.device)
            held_B = positions_B % held_out_every == held_out_every - 1
            for is_held, chosen_B in ((False, ~held_B), (True, held_B)):
                weights = None if weights_BN is None else weights_BN[chosen_B]
                self.pairs += _pieces(x_BNC[chosen_B], weights, is_held)
            seen += len(x_BNC)
        if seen < held_out_every:
            raise BadInput(
                f"closed loop: got {seen} images, expected at least {held_out_every}, "
                "because one in so many is held out to choose how far to trust the fit"
            )

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    @property
    def channels(self) -> int:
        return self.pairs[0].dense.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.pairs[0].dense.device

    def advance(self, step: Step) -> None:
        """Both streams of all images through the same step."""
        for pair in self.pairs:
            pair.advance(step)


def embedded(model: nn.Module, inputs: InputSet, batch_size: int) -> Iterator[Embedded]:
    """The first residual stream of every input, where the model is."""
    family, where = family_of(model), device(model)
    for batch in inputs.batches(batch_size):
        here = moved(batch, where)
        yield family.embedded(model, here), family.token_weights(model, here)
