"""Architectures and builders of models from a user's code, and of modules in memory, which must be given again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from torch import nn

from corp_deploy.spec.architecture import Architecture, Preprocessing
from corp_deploy.spec.trusted_code import FAMILY, Code
from corp_deploy.traced.models.array_inputs import parameters_of
from corp_deploy.traced.models.module import TracedModule, facts_of, is_librarys, traced_module, traced_state
from ground.errors import BadInput
from ground.ports import Port
from ground.records import record_from_value

from .module_facts import facts_of_arrays, facts_of_images, facts_of_module
from .plain_module import copy_of, plain_class, plain_module_, require_module, unwrapped
from .timm_images import ImageSpec

NAME = "memory"
_GIVEN: ContextVar[nn.Module | None] = ContextVar("given", default=None)
_Side = Annotated[int, Meta(ge=1, le=2**20)]


class _Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An array that a parameter of forward takes, with its shape without the batch."""

    name: str
    shape: Annotated[tuple[_Side, ...], Meta(min_length=1, max_length=8)]
    dtype: Literal["float32", "int64", "int32", "uint8", "bool"] = "float32"


class _Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inputs of a module that does not declare them itself: images of a size, or arrays."""

    input_size: tuple[_Side, _Side, _Side] | None = None
    inputs: tuple[_Input, ...] = ()


def inputs_of_arrays(model: nn.Module, arrays: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Return the entry `input_size` for one example array [N,C,H,W], `inputs` for any other array or for named ones."""
    if isinstance(arrays, Mapping):
        return {"inputs": [_entry(name, each) for name, each in arrays.items()]}
    entry = _entry(next(iter(parameters_of(model)), "inputs"), arrays)
    return {"input_size": entry["shape"]} if len(entry["shape"]) == 3 else {"inputs": [entry]}


def _entry(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape[1:]), "dtype": str(array.dtype).removeprefix("torch.")}


@contextmanager
def available_module(module: nn.Module | None) -> Iterator[None]:
    """Let the body build models that existed only in memory from `module`; None keeps the previous module."""
    token = _GIVEN.set(_GIVEN.get() if module is None else module)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def _class_name(module: nn.Module) -> str:
    plain = plain_class(module)
    return f"{plain.__module__}.{plain.__qualname__}"


def architecture_in_memory(module: nn.Module, inputs: Mapping[str, Any]) -> Architecture:
    return Architecture(name=_class_name(module), kwargs=dict(inputs), family=NAME)


def build_in_memory(architecture: Architecture) -> nn.Module:
    """Return a traced copy of the module in _GIVEN. Raises BadInput for none, another class, or one that can't run."""
    given = _GIVEN.get()
    if given is None:
        raise BadInput(
            f"{architecture.name}: the model was a module in memory, and no file says how it is made; in Python give "
            "it beside the directory: corp_deploy.Source(DIR, module=MODULE); for commands reduce a function's model: "
            "module:PATH.py:FUNCTION"
        )
    require_module(given, f"{architecture.name}: got")
    module = unwrapped(given)
    if (name := _class_name(module)) != architecture.name:
        raise BadInput(f"module: a {name}, and the directory's model was a {architecture.name}; give that")
    with torch.device("cpu"), torch.inference_mode(False):
        try:
            copied, notes = plain_module_(copy_of(module))
            copied = copied.cpu().float().eval().requires_grad_(False)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise BadInput(f"{architecture.name}: the module can't be copied ({str(error)[:200]})") from None
        if isinstance(copied, TracedModule):
            return copied
        remedy = "give what the module takes: input_size [3, height, width] for images"
        declared = record_from_value(architecture.kwargs, _Inputs, where="a module in memory", remedy=remedy)
        if declared.input_size is not None:
            facts = facts_of_images(copied, declared.input_size, architecture.preprocessing)
        elif declared.inputs:
            ports = tuple(Port(name=each.name, shape=each.shape, dtype=each.dtype) for each in declared.inputs)
            facts = facts_of_arrays(copied, ports)
        else:
            facts = facts_of_module(copied, architecture.preprocessing)
        traced = traced_module(copied, facts)
        traced_state(traced).notes = notes
        return traced


def architecture_of_code(code: Code, arguments: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """Return the architecture that config.json keeps, with the source, so that a directory needs no other file."""
    kwargs = {"source": code.source, "arguments": dict(arguments)}
    name = f"{code.file}:{code.function}"
    return Architecture(name=name, kwargs=kwargs, preprocessing=preprocessing, family=FAMILY)


def build_from_code(architecture: Architecture) -> nn.Module:
    """Return the traced model that the code makes, on the CPU.

    torch's default device is not used, since the code may look at values. Raises BadInput where code is not trusted,
    and where it does not return a module.
    """
    file, function = architecture.name.rsplit(":", 1) if ":" in architecture.name else (architecture.name, "")
    source, arguments = architecture.kwargs.get("source"), architecture.kwargs.get("arguments")
    if not isinstance(source, str) or not isinstance(arguments, Mapping):
        raise BadInput(f"{architecture.name}: no source and arguments of a model's code; write the model again")
    code = Code(file=file, function=function, source=source)
    with torch.device("cpu"):
        made = code.called(dict(arguments))
        where = f"{code.file}: {code.function}() gives"
        require_module(made, where)
        model, notes = plain_module_(made)
        try:
            model = model.eval().requires_grad_(False)
        except NotImplementedError:  # of modules that torch.export made
            raise BadInput(
                f"{where} a module that torch.export made, expected a plain torch.nn.Module; give the one that it was "
                "made from, with its weights"
            ) from None
        if not isinstance(model, TracedModule):
            model = traced_module(model.float(), facts_of_module(model, architecture.preprocessing))
    state = traced_state(model)
    state.notes = notes
    if (spec := user_image_spec(model)) is not None:
        settings = architecture.preprocessing.spread(spec.shape[0]).settings
        state.facts = replace(facts_of(model), spec=replace(spec, config={**spec.config, **settings}))
    return model


def user_image_spec(model: nn.Module) -> ImageSpec | None:
    """Return the image spec of a user's traced module; None for timm's models and models of other inputs."""
    if not isinstance(model, TracedModule) or is_librarys(model):
        return None
    spec = facts_of(model).spec
    return spec if isinstance(spec, ImageSpec) else None
