"""What a closed loop sums over both streams at one branch, in as few runs of its layers as the algebra allows.

An MLP's hidden channels are summed once, before any is chosen: the regression on those kept is a part of the sums. The
dense stream is advanced on the way, so that what the reduced one lacks of it is known. Where a norm follows the layer
that is brought in front of it (algebra/norm_behind.py), and tokens count by how much the norm passes of a change there.

Legend: B images of a piece, N tokens, C channels of the stream, F hidden channels, K inputs of a last linear layer.
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
class Halves(Generic[S]):
    """The same sums over the images of the fit and over those held out."""

    fit: S
    held_out: S

    def of(self, pair: Pair) -> S:
        return self.held_out if pair.held_out else self.fit

    def each(self, change: Callable[[S], T]) -> "Halves[T]":
        return Halves(fit=change(self.fit), held_out=change(self.held_out))


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
