"""A reduced sublayer's outputs as a linear function of small changes of its first layer, where the reduced stream is.

Legend: B inputs of a pair, N tokens, X tokens that count, C channels of the stream, D channels and a one, K inputs of
the last layer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from corp_deploy.algebra.gauss_newton import Residuals
from corp_deploy.algebra.tangents import RunTangent
from corp_deploy.reduction.streams import Pair

_CACHED_BYTES = 2**30


def counts(read: Tensor | None, pair: Pair) -> Tensor:
    """How much each token of the reduced stream counts behind a segment [B,N]; 0 where it isn't read or there."""
    is_read_N = torch.ones(pair.target.shape[1], device=pair.reduced.device)
    if read is not None:
        is_read_N = torch.zeros_like(is_read_N).index_fill_(0, read, 1.0)
    present_BN = pair.present_BN
    is_read_BN = is_read_N.expand(len(pair.reduced), -1)
    if present_BN is None or present_BN.shape != is_read_BN.shape:  # as of what is pooled
        return is_read_BN
    return is_read_BN * present_BN.to(is_read_BN)


def _size(lacking: Residuals) -> int:
    tangent: Any = lacking.tangent
    tensors = (getattr(tangent, name) for name in tangent.__slots__)
    own = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
    return own + (tangent.held_bytes if isinstance(tangent, RunTangent) else 0)


class Linearised:
    """What is linear in small changes of a layer, on some pairs; what doesn't fit in a gigabyte is computed again at
    each look.
    """

    def __init__(self, look: Callable[[Pair], Residuals], pairs: Sequence[Pair]) -> None:
        self._look, self._pairs = look, pairs
        self._cached: dict[int, Residuals] = {}
        self._left = _CACHED_BYTES

    def _piece(self, index: int) -> Residuals:
        if index in self._cached:
            return self._cached[index]
        lacking = self._look(self._pairs[index])
        if (size := _size(lacking)) <= self._left:
            self._left -= size
            self._cached[index] = lacking
        return lacking

    def __iter__(self) -> Iterator[Residuals]:
        return map(self._piece, range(len(self._pairs)))
