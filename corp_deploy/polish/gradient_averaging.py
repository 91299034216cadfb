"""In which precision a polish computes, and one module's gradients averaged over processes and micro-batches (data
parallel).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calib.distributed import Ranks
from calib.products import matmul_precision
from corp_deploy.traced.models.module import device

Piece = TypeVar("Piece")


def reduced_precision(where: torch.device) -> AbstractContextManager[Any]:
    """On a GPU products in bfloat16, with weights, gradients and errors in float32; on a CPU float32 throughout."""
    return torch.autocast("cuda", torch.bfloat16) if where.type == "cuda" else nullcontext()


def tf32(where: torch.device) -> AbstractContextManager[None]:
    """On a GPU the products that stay float32 by TF32, as long as the body lasts."""
    return matmul_precision("high") if where.type == "cuda" else nullcontext()


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
