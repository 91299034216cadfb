"""The builder of models of which nothing tells how they are made but a module that is in memory, given by its user."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import nn

from corp_deploy.traced.models.array_inputs import ArraySpec, parameters_of
from corp_deploy.traced.models.module import Facts, TracedModule, traced_module, traced_state
from ground.errors import BadInput
from ground.ports import Port
from ground.records import record_from_value

from .architecture import Architecture, Preprocessing
from .module_facts import facts_of_images, facts_of_module, facts_with

NAME = "memory"
_GIVEN: ContextVar[nn.Module | None] = ContextVar("given", default=None)
_Side = Annotated[int, Meta(ge=1, le=2**20)]


class _Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a parameter of forward takes, behind the batch."""

    name: str
    shape: Annotated[tuple[_Side, ...], Meta(min_length=1, max_length=8)]
    dtype: Literal["float32", "int64", "int32", "uint8", "bool"] = "float32"


class Taken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a module takes, where it doesn't say so itself: images of a size, or arrays."""

    input_size: tuple[_Side, _Side, _Side] | None = None
    inputs: tuple[_Input, ...] = ()


def taken_from(record: Mapping[str, Any]) -> Taken:
    """Of arguments, of an entry of config.json, or of what moments say. Raises BadInput, naming the entry."""
    remedy = "of a module in memory say what it takes: input_size [3, height, width] of images"
    return record_from_value(record, Taken, where="a module in memory", remedy=remedy)


def taken_of_arrays(model: nn.Module, arrays: Mapping[str, Any] | Any) -> dict[str, Any]:
    """As arrays [N, ...] show it: one of floats with four axes is of images."""
    if isinstance(arrays, Mapping):
        return {"inputs": [_entry(name, each) for name, each in arrays.items()]}
    entry = _entry(next(iter(parameters_of(model)), "inputs"), arrays)
    return {"input_size": entry["shape"]} if len(entry["shape"]) == 3 else {"inputs": [entry]}


def _entry(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape[1:]), "dtype": str(array.dtype).removeprefix("torch.")}


@contextmanager
def available_module(module: nn.Module | None) -> Iterator[None]:
    """Within it the module stands for what directories say that was in memory; None leaves what stood for it."""
    token = _GIVEN.set(_GIVEN.get() if module is None else module)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _class_of(module: nn.Module) -> str:
    plain = traced_state(module).plain if isinstance(module, TracedModule) else type(module)
    return f"{plain.__module__}.{plain.__qualname__}"


def architecture_of(module: nn.Module, settings: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """What config.json keeps."""
    return Architecture(name=_class_of(module), kwargs=dict(settings), preprocessing=preprocessing, family=NAME)


def build(architecture: Architecture) -> nn.Module:
    """A copy of the module that is given, traced, on the CPU. Raises BadInput where none is, or one of another class,
    and for one that can't be copied or run.
    """
    module = _GIVEN.get()
    if module is None:
        raise BadInput(
            f"{architecture.name}: the model was a module in memory, and no file says how it is made; in Python give "
            "it beside the directory: corp_deploy.Source(DIR, module=MODULE); for commands reduce a function's model: "
            "module:PATH.py:FUNCTION"
        )
    if _class_of(module) != architecture.name:
        raise BadInput(f"module: a {_class_of(module)}, and the directory's model was a {architecture.name}; give that")
    with torch.device("cpu"), torch.inference_mode(False):
        try:
            copied = copy.deepcopy(module).cpu().float().eval().requires_grad_(False)
        except RuntimeError as error:
            raise BadInput(f"{architecture.name}: the module can't be copied ({str(error)[:200]})") from None
        if isinstance(copied, TracedModule):
            return copied
        return traced_module(copied, _facts(copied, taken_from(architecture.kwargs), architecture.preprocessing))


def _facts(model: nn.Module, call: Taken, preprocessing: Preprocessing) -> Facts:
    if call.input_size is not None:
        return facts_of_images(model, call.input_size, preprocessing)
    if not call.inputs:
        return facts_of_module(model, preprocessing)
    ports = tuple(Port(name=each.name, shape=each.shape, dtype=each.dtype) for each in call.inputs)
    return facts_with(model, ArraySpec(ports=ports), [port.name for port in ports])
