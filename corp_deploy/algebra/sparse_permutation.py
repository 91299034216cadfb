"""Orders of a layer's inputs: what a k:n pattern drops depends on who stands beside whom. PURE.

Legend: O rows, K inputs.
"""

import torch
from torch import Tensor

from .sparsity import Sparsity


def saliency(weight_OK: Tensor, spread_K: Tensor) -> Tensor:
    """By input sum_o w_oj^2 Var(x_j) [K]: what dropping it alone costs."""
    return weight_OK.square().sum(dim=0) * spread_K


def interleaved(score_K: Tensor, sparsity: Sparsity, *, block: int | None = None) -> Tensor:
    """CAST's order [K]: sorted by score, cut into n quantiles, and one of each in every group; within blocks of so many
    neighbours each.
    """
    blocks = score_K.view(-1, len(score_K) if block is None else block)
    assert not blocks.shape[1] % sparsity.of, (block, sparsity)
    order_BV = blocks.argsort(dim=1, descending=True, stable=True)
    order_BV = order_BV.view(len(blocks), sparsity.of, -1).transpose(1, 2).flatten(1)
    starts_B = torch.arange(len(blocks), device=score_K.device) * blocks.shape[1]
    return (order_BV + starts_B[:, None]).flatten()
