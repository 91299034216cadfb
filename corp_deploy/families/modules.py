"""Copies of models with some modules replaced; models are never edited."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def device(model: nn.Module) -> torch.device:
    """Where the model's weights are; of one without any, the CPU."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with the named submodules replaced; the model given is left as it is."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


def linear(inputs: int, outputs: int, **how: Any) -> nn.Linear:
    """A linear layer whose weights are to be set; torch warns of initialising one without any."""
    layer = nn.Linear(max(inputs, 1), max(outputs, 1), **how)
    if inputs and outputs:
        return layer
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(layer.weight.new_zeros(outputs, inputs))
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.new_zeros(outputs))
    return layer


@torch.no_grad()
def fill_(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Set a new linear layer; the one place where float64 results become the model's type."""
    linear.weight.copy_(weight)
    if linear.bias is not None:
        assert bias is not None, "a layer with bias needs one"
        linear.bias.copy_(bias)


def stacked(layers: Sequence[nn.Linear]) -> nn.Linear:
    """A copy of linear layers of the same inputs as one, whose rows are theirs in turn."""
    if len(layers) == 1:
        return copy.deepcopy(layers[0])
    first, bias = layers[0], layers[0].bias is not None
    rows = sum(layer.out_features for layer in layers)
    whole = linear(first.in_features, rows, bias=bias, device=first.weight.device, dtype=first.weight.dtype)
    fill_(
        whole,
        torch.cat([layer.weight for layer in layers]),
        torch.cat([layer.bias for layer in layers]) if bias else None,
    )
    return whole.requires_grad_(first.weight.requires_grad)


def parameters(*modules: nn.Module) -> int:
    """Parameters of these modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def counts_of_batches(model: nn.Module) -> dict[str, Tensor]:
    """Of how many batches its norms met in training, which older files don't have and what is trained never reads."""
    return {name: each for name, each in model.state_dict().items() if name.endswith("num_batches_tracked")}
