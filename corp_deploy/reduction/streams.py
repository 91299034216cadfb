"""Sums over a stream: its variance, a check for NaN and Inf, and means over merged tokens.

Legend: B images of a piece, N tokens, M tokens before merging, C channels of the stream.
"""

import torch
from torch import Tensor

from ground.errors import BadInput


def refuse_nonfinite(site: str, sums: Tensor) -> None:
    if not bool(torch.isfinite(sums).all()):
        raise BadInput(
            f"{site}: NaN or Inf in the activations; (a) the weights or an image hold NaN or Inf, or (b) what is left "
            "of the model overflows: reduce less"
        )


class StreamEnergy:
    """Sums that give the variance of a stream over the added tokens, summed over the channels."""

    def __init__(self) -> None:
        self._count, self._sums, self._squares = 0.0, list[Tensor](), list[Tensor]()

    def add(self, x_BNC: Tensor, weights_BN: Tensor | None = None) -> None:
        x_XC = x_BNC.flatten(0, 1).double()
        weighted_XC = x_XC if weights_BN is None else x_XC * weights_BN.double().flatten().unsqueeze(1)
        self._count += len(x_XC) if weights_BN is None else float(weights_BN.double().sum())
        self._sums.append(weighted_XC.sum(dim=0))
        self._squares.append((weighted_XC * x_XC).sum())

    def variance(self) -> float:
        mean_C = torch.stack(self._sums).sum(dim=0) / self._count
        return float(torch.stack(self._squares).sum() / self._count - mean_C.square().sum())


def mean_of_sources(x_BMC: Tensor, sources_BM: Tensor, count: int) -> Tensor:
    """Average the tokens of x that were merged into each of `count` tokens.

    `sources_BM` is the merged token that each token of x is part of, below 0 for none.
    """
    is_in_BMN = (sources_BM.unsqueeze(-1) == torch.arange(count, device=x_BMC.device)).to(x_BMC.dtype)
    return (is_in_BMN.transpose(1, 2) @ x_BMC) / is_in_BMN.sum(dim=1).unsqueeze(-1)
