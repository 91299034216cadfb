"""Layers that a polish fits, each weight with its bias as one more column.

Legend: O outputs, D inputs of a layer (of a pointwise convolution those of a place), and one more where it has a bias.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear layer or a pointwise convolution by its name in the model."""

    name: str
    layer: nn.Linear | nn.Conv2d

    @property
    def values_OD(self) -> Tensor:
        """A copy of weight and bias side by side."""
        weight_OD = self.layer.weight.detach().flatten(1)
        if self.layer.bias is None:
            return weight_OD.clone()
        return torch.cat([weight_OD, self.layer.bias.detach().unsqueeze(1)], dim=1)

    @torch.no_grad()
    def set_(self, values_OD: Tensor) -> None:
        weight = self.layer.weight
        weight.copy_(values_OD[:, : weight[0].numel()].reshape(weight.shape))
        if self.layer.bias is not None:
            self.layer.bias.copy_(values_OD[:, -1])
