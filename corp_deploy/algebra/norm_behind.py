"""What a layer should give in front of a layer norm that follows it, so that a residual stream is whole behind both.

The norm makes of y = W h + b the addition s(y) = gain * u, u = (y - mean y) / sigma(y). Where the dense layer gives y
of a token and the reduced stream has drifted, the addition that is wanted is s(y) + drift. Around the dense layer's
own y, which is where the fit is to arrive, s(y + d) = s(y) + gain * d / sigma to first order for all d without a mean
and without a share of u; of any other d the norm takes those parts off. Of these

    d / sigma = argmin |gain * d / sigma - drift|^2 + damping * mean(gain^2) |d / sigma|^2,

so y + d is what the layer should give. The damping keeps d where the norm is nearly linear: a channel of hardly any
gain would else be asked for so much that sigma grows for all. An error in front is worth gain / sigma behind the norm,
so tokens count by 1 / sigma^2: a plain fit of y counts most the tokens that the norm shrinks most, and makes up for no
drift.

Legend: B inputs, N tokens, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.1
_NOTHING_REL = 1e-8  # of the weights' sum: a token whose channels are all alike has no direction of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class NormBehind:
    """The norm with what follows it: `gain_C` times the deviation from the mean by the token's own."""

    gain_C: Tensor
    eps: float

    def _sigma(self, given_BNC: Tensor) -> Tensor:
        return (given_BNC.var(dim=-1, correction=0, keepdim=True) + self.eps).sqrt()

    def passed(self, given_BNC: Tensor) -> Tensor:
        """How much a squared change of what the layer gives counts [B,N], but for the gain."""
        return self._sigma(given_BNC).squeeze(-1).square().reciprocal()

    def before(self, added_BNC: Tensor, given_BNC: Tensor) -> Tensor:
        """Gain times what the layer should give so that this is added, where the dense layer gives `given_BNC`."""
        sigma, square_C = self._sigma(given_BNC), self.gain_C.square()
        unit_BNC = (given_BNC - given_BNC.mean(dim=-1, keepdim=True)) / sigma
        drift_BNC = added_BNC - self.gain_C * unit_BNC
        weight_C = 1.0 / (square_C + DAMPING * square_C.mean()).clamp_min(torch.finfo(square_C.dtype).tiny)
        return self.gain_C * (given_BNC + sigma * _tangent(self.gain_C * drift_BNC, unit_BNC, weight_C))


def _tangent(wanted_BNC: Tensor, unit_BNC: Tensor, weight_C: Tensor) -> Tensor:
    """weight * (wanted - a - b u) with a and b such that it has no mean and no share of u."""

    def along(direction: Tensor) -> Tensor:
        norm = (weight_C * direction.square()).sum(dim=-1, keepdim=True)
        part = (weight_C * direction * wanted_BNC).sum(dim=-1, keepdim=True)
        return direction * (part / norm.clamp_min(_NOTHING_REL * float(weight_C.sum())))

    constant_C = torch.ones_like(weight_C)
    mean = (weight_C * unit_BNC).sum(dim=-1, keepdim=True) / weight_C.sum()
    return weight_C * (wanted_BNC - along(constant_C) - along(unit_BNC - mean))
