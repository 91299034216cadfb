"""The residual streams of the dense and of the reduced model, carried side by side through the blocks.

Legend: B images of a piece, N tokens, C channels.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

HELD_OUT_EVERY = 4
CPU_TOKENS = 2048  # of a piece: its activations stay in a CPU's caches, and products over it are long enough
Step = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class Pair:
    """Both streams [B,N,C] of a few images; those `held_out` choose how far to trust a fit to the others."""

    dense: Tensor
    reduced: Tensor
    held_out: bool

    def advance(self, step: Step) -> None:
        """Both through the same step; once, as long as they are one."""
        same = self.reduced is self.dense
        self.dense = step(self.dense)
        self.reduced = self.dense if same else step(self.reduced)


def _pieces(x_BNC: Tensor, held_out: bool) -> Iterator[Pair]:
    size = max(1, CPU_TOKENS // x_BNC.shape[1]) if x_BNC.device.type == "cpu" else max(1, len(x_BNC))
    for piece_BNC in x_BNC.split(size) if len(x_BNC) else ():
        yield Pair(dense=piece_BNC, reduced=piece_BNC, held_out=held_out)


class Streams:
    """Both streams of every image, a few images at a time, float32, where they come from.

    Memory: 2 * images * N * C * 4 bytes, so 2.4 GB for 2,000 images of a model with 197 tokens of 768 channels.
    """

    def __init__(self, embedded: Iterable[Tensor], *, held_out_every: int = HELD_OUT_EVERY) -> None:
        """`embedded`: what enters the first block, batch by batch; each `held_out_every`-th image is held out.

        Raises BadInput for too few images.
        """
        self.pairs: list[Pair] = []
        seen = 0
        for x_BNC in embedded:
            positions_B = torch.arange(seen, seen + len(x_BNC), device=x_BNC.device)
            held_B = positions_B % held_out_every == held_out_every - 1
            self.pairs += [*_pieces(x_BNC[~held_B], False), *_pieces(x_BNC[held_B], True)]
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
