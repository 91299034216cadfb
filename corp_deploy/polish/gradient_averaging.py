"""One module's gradients averaged over processes and micro-batches (data parallel)."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calib.distributed import Ranks
from corp_deploy.traced.models.module import device

from .arithmetic import reduced_precision

Piece = TypeVar("Piece")


class GradientAverager:
    """A module whose parameters that require gradients get the mean of those of all processes (see torchrun)."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module, self.where = module, device(module)
        self.shared = DistributedDataParallel(module) if ranks.size > 1 else None

    def __call__(self, *inputs: object) -> Tensor:
        out: Tensor = (self.shared or self.module)(*inputs)
        return out

    def backward(self, loss: Callable[[Piece], Tensor], pieces: Sequence[Piece]) -> None:
        """Add the gradients of `loss` over all pieces; the processes exchange theirs once, with the last piece."""
        for place, piece in enumerate(pieces, start=1):
            own = self.shared is not None and place < len(pieces)
            with self.shared.no_sync() if self.shared is not None and own else nullcontext(), torch.enable_grad():
                with reduced_precision(self.where):
                    value = loss(piece)
                value.backward()
