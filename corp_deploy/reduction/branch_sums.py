"""Sums over a stream: of the images of a fit and of those held out apart, its energy, and whether it is finite.

Legend: B images of a piece, N tokens, C channels of the stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ground.errors import BadInput

from .streams import Pair

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSums(Generic[S]):
    """The same sums over the images of the fit and over those held out."""

    fit: S
    held_out: S

    def of(self, pair: Pair) -> S:
        return self.held_out if pair.held_out else self.fit

    def each(self, change: Callable[[S], T]) -> "SplitSums[T]":
        return SplitSums(fit=change(self.fit), held_out=change(self.held_out))


def refuse_nonfinite(site: str, sums: Tensor) -> None:
    if not bool(torch.isfinite(sums).all()):
        raise BadInput(
            f"{site}: NaN or Inf in the activations; (a) the weights or an image hold NaN or Inf, or (b) what is left "
            "of the model overflows: reduce less"
        )


class StreamEnergy:
    """Variance of a stream over some tokens of every image, summed over the channels."""

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
