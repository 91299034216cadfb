"""How much each token counts: an attention mask, or how many tokens stand merged in one.

A token of weight 0 contributes nothing, whatever its values. What has one vector for each input (a pooled one) counts
it once, where any of the input's tokens counts.

Shapes: B inputs, N tokens, F channels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ground.errors import BadInput

from .inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialTokenWeights:
    """Weights [B,N] for whatever has N tokens; all else, another input's tokens and maps say, counts alike."""

    weight_BN: Tensor


TokenWeights = Callable[[Inputs], Tensor | PartialTokenWeights | None]
"""Weights [B,N], not negative, of a batch's tokens; None where all count alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """weight_BN float32 of one forward pass; `total` is their sum, a whole number where it is one."""

    weight_BN: Tensor
    total: float

    def along(self, x: Tensor) -> Tensor:
        """The weights as they multiply x [B,...,N,F]."""
        return self.weight_BN.view(len(x), *[1] * (x.ndim - 3), -1, 1)


def weights_of(weight_BN: Tensor, device: torch.device) -> Weights:
    """Weights [B,N] that are known to be good, for sums on that device."""
    total = float(weight_BN.double().sum())
    device_weight_BN = weight_BN.float().to(device, non_blocking=True)
    return Weights(weight_BN=device_weight_BN, total=int(total) if total.is_integer() else total)


def weights_by_tokens(weight_BN: Tensor, count: int, device: torch.device) -> Mapping[int, Weights]:
    """The weights of `count` inputs for activations of N tokens, and for those of one vector an input.

    Raises BadInput unless they are [count,N], finite and not negative.
    """
    shape = list(weight_BN.shape)
    if weight_BN.ndim != 2 or shape[0] != count or not shape[1] or weight_BN.is_complex():
        raise BadInput(f"token weights: got {weight_BN.dtype} {shape}, expected numbers [{count}, tokens]")
    weight_BN = weight_BN.float()
    if not bool((torch.isfinite(weight_BN) & (weight_BN >= 0)).all()):
        span = f"{float(weight_BN.min()):g} to {float(weight_BN.max()):g}"
        raise BadInput(f"token weights: got numbers from {span}, expected finite ones of 0 or more")
    any_B1 = (weight_BN > 0).any(1, keepdim=True).float()
    return {1: weights_of(any_B1, device), shape[1]: weights_of(weight_BN, device)}


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return (x.float() * factor).masked_fill_(factor == 0, 0.0)


def weighted(x: Tensor, weights: Weights | None) -> Tensor:
    """x [B,...,N,F] times the weight of its token, float32; x itself without weights."""
    return x if weights is None else _scaled(x, weights.along(x))


def weighted_by_root(x: Tensor, weights: Weights | None) -> Tensor:
    """x [B,...,N,F] times the root of its token's weight, so that products are weighted; x itself without weights."""
    return x if weights is None else _scaled(x, weights.along(x).sqrt())


def token_count(x_BNF: Tensor, weights: Weights | None) -> float:
    """How many tokens there are, each counted by its weight."""
    return x_BNF.shape[0] * x_BNF.shape[1] if weights is None else weights.total
