"""Copies of models with some modules replaced; models are never edited."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ground.errors import BadInput


def device(model: nn.Module) -> torch.device:
    """Where the model's weights are; of one without any, the CPU."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with the named submodules replaced; the model given is left as it is."""
    memo: dict[int, Any] = {id(model.get_submodule(name)): new for name, new in modules.items()}
    return copy.deepcopy(model, memo)


MOST_PARAMETERS = 20_000_000_000
"""Of a model that is built."""


def refuse_larger(build: Callable[[], nn.Module], what: str) -> None:
    """Raise BadInput for a model of more parameters than are built, before it has memory."""
    with torch.device("meta"):
        count = parameters(build())
    if count > MOST_PARAMETERS:
        raise BadInput(f"{what}: {count:,} parameters; {MOST_PARAMETERS:,} at most are built")


def parameters(*modules: nn.Module) -> int:
    """Parameters of these modules together."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def counts_of_batches(model: nn.Module) -> dict[str, Tensor]:
    """Of how many batches its norms met in training, which older files don't have and what is trained never reads."""
    return {name: each for name, each in model.state_dict().items() if name.endswith("num_batches_tracked")}
