"""Copies of modules that may change their own state, as some do that keep tables from their first call on."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def twin(module: Module, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Module:
    """With what is made of each parameter and buffer, itself unless said."""
    memo: dict[int, Any] = {}
    for each in (*module.parameters(), *module.buffers()):
        new = convert(each)
        is_other = isinstance(each, nn.Parameter) and new is not each
        memo[id(each)] = nn.Parameter(new.detach(), requires_grad=False) if is_other else new
    return copy.deepcopy(module, memo)


def without_memory(module: Module) -> Module:
    """With names and shapes of weights alone."""
    return twin(module, lambda tensor: tensor.detach().to("meta"))
