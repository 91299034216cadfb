"""The residual streams of the dense and of the reduced model, carried side by side through the blocks.

Legend: B images of a batch, N tokens, C channels.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from calib.collect import MlpSite
from calib.hooks import listening

from . import vit

Step = Callable[[Tensor], Tensor]


class Streams:
    """Both streams [B,N,C] of every image, batch by batch, float32, where they come from.

    Memory: 2 * images * N * C * 4 bytes, so 2.4 GB for 2,000 images of a model with 197 tokens of 768 channels.
    """

    def __init__(self, embedded: Iterable[Tensor]) -> None:
        """`embedded`: what enters the first block, batch by batch."""
        self.dense = list(embedded)
        self.reduced = list(self.dense)

    def advance(self, dense: Step, reduced: Step) -> None:
        """Each stream through its own step."""
        self.advance_dense(dense)
        self.advance_reduced(reduced)

    def advance_dense(self, step: Step) -> None:
        for index, x_BNC in enumerate(self.dense):
            self.dense[index] = step(x_BNC)

    def advance_reduced(self, step: Step) -> None:
        for index, x_BNC in enumerate(self.reduced):
            self.reduced[index] = step(x_BNC)

    def energy(self, read: slice) -> float:
        """Variance of the dense stream over these tokens of every image, summed over the channels."""
        count = sum(x_BNC[:, read].shape[:2].numel() for x_BNC in self.dense)
        mean_C = torch.stack([x_BNC[:, read].double().sum(dim=(0, 1)) for x_BNC in self.dense]).sum(dim=0) / count
        return sum(float((x_BNC[:, read] - mean_C).square().sum()) for x_BNC in self.dense) / count

    def entering(self, norm: nn.Module, first: nn.Linear, read: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Per batch, with the reduced stream behind the norm as inputs [B,N,C] of the branch's first layer: what that
        makes of the dense stream less what it makes of the reduced one, [B,N,outputs]; of the tokens that are read.
        """
        for dense_BNC, reduced_BNC in zip(self.dense, self.reduced, strict=True):
            x_BNC = norm(reduced_BNC)[:, read]
            yield x_BNC, first(norm(dense_BNC)[:, read]) - first(x_BNC)

    def missing(self, branch: vit.Branch, layer: nn.Module, last: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
        """Per batch, with `layer` in the branch and the dense stream already after it: the inputs [B,N,K] of the
        layer's last linear layer, and what the reduced stream then lacks of the dense one, [B,N,C]; of the tokens that
        are read.
        """
        heard: list[Tensor] = []
        with listening([MlpSite(name=branch.name, output=last)], lambda _, __, x_BNK: heard.append(x_BNK)):
            for dense_BNC, reduced_BNC in zip(self.dense, self.reduced, strict=True):
                heard.clear()
                after_BNC = reduced_BNC + branch.added_by(layer, reduced_BNC)
                assert len(heard) == 1, (branch.name, len(heard))
                yield heard[0][:, branch.read], (dense_BNC - after_BNC)[:, branch.read]


class Normed(nn.Module):
    """A branch's layer behind its norm, as a model of [B,1,N,C] 'images', which is what calibration takes."""

    def __init__(self, branch: vit.Branch) -> None:
        super().__init__()
        self.norm, self.layer = branch.norm, branch.layer

    def forward(self, x_B1NC: Tensor) -> Tensor:
        out: Tensor = self.layer(self.norm(x_B1NC.squeeze(1)))
        return out
