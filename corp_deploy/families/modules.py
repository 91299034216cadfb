"""Copies of models with some modules replaced; models are never edited."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def device(model: nn.Module) -> torch.device:
    """Where the model's weights are."""
    return next(model.parameters()).device


def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with the named submodules replaced; the model given is left as it is."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


def with_modules(layer: nn.Module, name: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """The layer of this name with its new modules, which are it or inside it and go by their names in the model."""
    return (
        modules[name]
        if name in modules
        else replaced(layer, {key.removeprefix(f"{name}."): new for key, new in modules.items()})
    )


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


def parameters(*modules: nn.Module) -> int:
    """Parameters of these modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
