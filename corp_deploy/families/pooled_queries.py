"""Queries of several tokens as one (Hiera, arXiv 2306.00989, section 3.2).

Legend: S tokens whose queries become one, n queries left, D dimensions of a head.
"""

from torch import Tensor, nn

REASON = (
    "queries of several tokens become one by their maximum, dimension by dimension, so head dimensions can't be mixed"
)


def pooled_by(q_norm: nn.Module) -> int:
    """How many tokens' queries become one."""
    return q_norm.count if isinstance(q_norm, PooledQueries) else 1


class PooledQueries(nn.Module):
    """[...,S * n,D] -> [...,n,D]: the maximum over S, whose tokens are n apart."""

    def __init__(self, count: int) -> None:
        """`count`: S."""
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(-2, (self.count, -1))
        return apart.amax(dim=-3)
