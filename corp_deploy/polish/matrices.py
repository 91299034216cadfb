"""What is polished of a model: the linear layers and the convolutions of its sites, each with its bias as one more
column.

Legend: O outputs, K inputs of a layer (of a convolution those of a place by place), and one more where it has a bias.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corp_deploy.families.family import layers_of, sites_of

from .walk import Block

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A layer by its name in the model; `scale` is the root mean square of its weight when it was taken."""

    name: str
    layer: Layer
    scale: float

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        weight, bias = self.layer.weight, self.layer.bias
        return (weight,) if bias is None else (weight, bias)

    @property
    def values_OK(self) -> Tensor:
        """A copy of weight and bias side by side."""
        return _side_by_side(parameter.detach() for parameter in self.parameters)

    @property
    def gradient_OK(self) -> Tensor:
        """Of weight and bias side by side."""
        return _side_by_side(torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters)

    def _weight_of(self, values_OK: Tensor) -> Tensor:
        """Without the bias, in the weight's own shape."""
        weight = self.layer.weight
        return values_OK[:, : weight[0].numel()].reshape(weight.shape)

    @torch.no_grad()
    def set_(self, values_OK: Tensor) -> None:
        """Put weight and bias there."""
        self.layer.weight.copy_(self._weight_of(values_OK))
        if self.layer.bias is not None:
            self.layer.bias.copy_(values_OK[:, -1])

    @torch.no_grad()
    def add_(self, change_OK: Tensor) -> None:
        """Add to weight and bias."""
        self.layer.weight.add_(self._weight_of(change_OK))
        if self.layer.bias is not None:
            self.layer.bias.add_(change_OK[:, -1])


def _side_by_side(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


def chosen_(model: nn.Module, block: Block | None = None) -> tuple[Matrix, ...]:
    """The matrices of all sites, or of the sites of one block; from now on of all the model's parameters those alone
    require gradients.
    """
    chosen: dict[str, Layer] = {}
    for site in sites_of(model).every:
        if block is None or block.holds(site.name):
            chosen |= {name: layer for name, layer in layers_of(model, site).items() if layer.weight.numel()}
    model.requires_grad_(False)
    for layer in chosen.values():
        layer.requires_grad_(True)
    return tuple(
        Matrix(name=name, layer=layer, scale=float(layer.weight.detach().square().mean().sqrt()))
        for name, layer in chosen.items()
    )
