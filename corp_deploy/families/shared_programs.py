"""Programs that are traced once in a process for equal architectures.

A program is decided by the architecture, the named outputs, and the settings that libraries read while they build and
run a model. Only models that installed libraries build by name share one, since a user's code can change between two
loads. No tensor with values is shared.
"""

import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache

import torch
from torch import nn

from corp_deploy.spec.architecture import Architecture
from corp_deploy.traced.models.module import TracedModule, Tracing, traced_state, tracing

from . import timm_library
from .family import builds_installed_code, named_outputs_of

MOST_PROGRAMS = 4
"""The number of programs that a process keeps, the last used ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The values that decide a program, and the model that is traced where no equal key has a program."""

    architecture: str
    outputs: tuple[str, ...] | None
    settings: tuple[object, ...]
    model: TracedModule = field(compare=False)


def _key(model: TracedModule, architecture: Architecture) -> _Key | None:
    """Return the key of a model's program, or None where the program is not shared."""
    if not (builds_installed_code(architecture) and _is_without_numbers(model)):
        return None
    try:
        text = json.dumps(asdict(architecture), sort_keys=True)
    except TypeError:  # code among the arguments
        return None
    named = named_outputs_of(model)
    settings = (torch.get_default_dtype(), *timm_library.settings())
    return _Key(architecture=text, outputs=None if named is None else named.names, settings=settings, model=model)


def _is_without_numbers(module: nn.Module) -> bool:
    return all(each.is_meta for each in (*module.parameters(), *module.buffers()))


@lru_cache(maxsize=MOST_PROGRAMS)
def _traced(key: _Key) -> Tracing | None:
    """Return the tracing of a key's model, or None where its program has constants with values."""
    own = tracing(key.model)
    return own if _is_without_numbers(own.program.graph) else None


def share_program_(model: TracedModule, architecture: Architecture) -> None:
    """Set the program and sites of a dense model without weights to those of an equal model, if there is one."""
    key = _key(model, architecture)
    own = None if key is None else _traced(key)
    if own is not None:
        traced_state(model).tracing = own.again()
