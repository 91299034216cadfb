"""The output that a layer in front of a layer norm should give to correct a drifted residual stream behind the norm.

The norm, with weight `gain`, turns y = W h + b into s(y) = gain * u, u = (y - mean y) / sigma(y), which is added to the
stream. For a token where the dense layer gives y and the reduced stream is off by -drift, the wanted addition is
s(y) + drift. Around the dense layer's own y,
where the fit should end, s(y + d) = s(y) + gain * d / sigma to first order for all d without a mean and without a
component along u; the norm removes both from any other d. Of these

    d / sigma = argmin |gain * d / sigma - drift|^2 + damping * mean(gain^2) |d / sigma|^2,

so the layer should give y + d. The damping keeps d where the norm is nearly linear: a channel with hardly any gain
would otherwise need so large a d that sigma grows for all channels. An error in front of the norm is worth
gain / sigma behind it, so tokens count by 1 / sigma^2: a plain fit of y gives most weight to the tokens that the norm
shrinks most, and corrects no drift.

Legend: B inputs, N tokens, C channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.1
_NOTHING_REL = 1e-8  # of the weights' sum: below it a token's channels are all alike and have no direction


@dataclass(frozen=True, slots=True, kw_only=True)
class NormBehind:
    """A layer norm without a bias: `gain_C` * (y - mean y) / sqrt(var y + `eps`) for each token y."""

    gain_C: Tensor
    eps: float

    def _sigma(self, given_BNC: Tensor) -> Tensor:
        return (given_BNC.var(dim=-1, correction=0, keepdim=True) + self.eps).sqrt()

    def passed(self, given_BNC: Tensor) -> Tensor:
        """Return 1 / sigma^2 [B,N]: the weight of a squared change in front of the norm, without the gain."""
        return self._sigma(given_BNC).squeeze(-1).square().reciprocal()

    def before(self, added_BNC: Tensor, given_BNC: Tensor) -> Tensor:
        """Return gain * (y + d), given the wanted addition s(y) + drift (`added_BNC`) and the dense output y."""
        sigma, square_C = self._sigma(given_BNC), self.gain_C.square()
        unit_BNC = (given_BNC - given_BNC.mean(dim=-1, keepdim=True)) / sigma
        drift_BNC = added_BNC - self.gain_C * unit_BNC
        weight_C = 1.0 / (square_C + DAMPING * square_C.mean()).clamp_min(torch.finfo(square_C.dtype).tiny)
        return self.gain_C * (given_BNC + sigma * _tangent(self.gain_C * drift_BNC, unit_BNC, weight_C))


def _tangent(wanted_BNC: Tensor, unit_BNC: Tensor, weight_C: Tensor) -> Tensor:
    """Return weight * (wanted - a - b u), with a and b per token such that it has no mean and no component along u."""

    def along(direction: Tensor) -> Tensor:
        norm = (weight_C * direction.square()).sum(dim=-1, keepdim=True)
        part = (weight_C * direction * wanted_BNC).sum(dim=-1, keepdim=True)
        return direction * (part / norm.clamp_min(_NOTHING_REL * float(weight_C.sum())))

    constant_C = torch.ones_like(weight_C)
    mean = (weight_C * unit_BNC).sum(dim=-1, keepdim=True) / weight_C.sum()
    return weight_C * (wanted_BNC - along(constant_C) - along(unit_BNC - mean))
