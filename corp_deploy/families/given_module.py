"""The builder of models that a user's code makes, and that of models which nothing but a module in memory describes."""

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
from .plain_module import copy_of, plain_module_, require_module, unwrapped
from .timm_images import ImageSpec

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


def architecture_in_memory(
    module: nn.Module, settings: Mapping[str, Any], preprocessing: Preprocessing
) -> Architecture:
    """What config.json keeps."""
    return Architecture(name=_class_of(module), kwargs=dict(settings), preprocessing=preprocessing, family=NAME)


def build_in_memory(architecture: Architecture) -> nn.Module:
    """A copy of the module that is given, traced, on the CPU. Raises BadInput where none is, or one of another class,
    and for one that can't be copied or run.
    """
    given = _GIVEN.get()
    if given is None:
        raise BadInput(
            f"{architecture.name}: the model was a module in memory, and no file says how it is made; in Python give "
            "it beside the directory: corp_deploy.Source(DIR, module=MODULE); for commands reduce a function's model: "
            "module:PATH.py:FUNCTION"
        )
    require_module(given, f"{architecture.name}: got")
    module = unwrapped(given)
    if _class_of(module) != architecture.name:
        raise BadInput(f"module: a {_class_of(module)}, and the directory's model was a {architecture.name}; give that")
    with torch.device("cpu"), torch.inference_mode(False):
        try:
            copied, notes = plain_module_(copy_of(module))
            copied = copied.cpu().float().eval().requires_grad_(False)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise BadInput(f"{architecture.name}: the module can't be copied ({str(error)[:200]})") from None
        if isinstance(copied, TracedModule):
            return copied
        remedy = "of a module in memory say what it takes: input_size [3, height, width] of images"
        taken = record_from_value(architecture.kwargs, Taken, where="a module in memory", remedy=remedy)
        if taken.input_size is None and taken.inputs:
            ports = tuple(Port(name=each.name, shape=each.shape, dtype=each.dtype) for each in taken.inputs)
            facts = facts_of_arrays(copied, ports)
        elif taken.input_size is None:
            facts = facts_of_module(copied, architecture.preprocessing)
        else:
            facts = facts_of_images(copied, taken.input_size, architecture.preprocessing)
        return _with_notes(traced_module(copied, facts), notes)


def _with_notes(model: TracedModule, notes: tuple[str, ...]) -> TracedModule:
    traced_state(model).notes = notes
    return model


def architecture_of_code(code: Code, arguments: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """What config.json keeps: the source itself, so that a directory needs no other file."""
    kwargs = {"source": code.source, "arguments": dict(arguments)}
    name = f"{code.file}:{code.function}"
    return Architecture(name=name, kwargs=kwargs, preprocessing=preprocessing, family=FAMILY)


def build_from_code(architecture: Architecture) -> nn.Module:
    """What the code makes, on the CPU whatever torch's default device is, since it may look at values: a module
    with named sites or any other. Raises BadInput where code isn't trusted, and for what is no module.
    """
    file, function = architecture.name.rsplit(":", 1) if ":" in architecture.name else (architecture.name, "")
    source, arguments = architecture.kwargs.get("source"), architecture.kwargs.get("arguments")
    if not isinstance(source, str) or not isinstance(arguments, Mapping):
        raise BadInput(f"{architecture.name}: no source and arguments of a model's code; write the model again")
    code = Code(file=file, function=function, source=source)
    with torch.device("cpu"):
        made = code.called(dict(arguments))
        require_module(made, f"{code.file}: {code.function}() gives")
        model, notes = plain_module_(made)
        model = _evaluated(model, f"{code.file}: {code.function}() gives")
        if not isinstance(model, TracedModule):
            model = traced_module(model.float(), facts_of_module(model, architecture.preprocessing))
    _with_notes(model, notes)
    if (spec := images_of(model)) is not None:
        state = traced_state(model)
        settings = architecture.preprocessing.spread(spec.shape[0]).settings
        state.facts = replace(facts_of(model), spec=replace(spec, config={**spec.config, **settings}))
    return model


def _evaluated(model: nn.Module, where: str) -> nn.Module:
    """Return the module in eval mode. Raises BadInput for one that has none, as what torch.export made."""
    try:
        return model.eval().requires_grad_(False)
    except NotImplementedError:
        raise BadInput(
            f"{where} a module that torch.export made, expected a plain torch.nn.Module; give the one that it was made "
            "from, with its weights"
        ) from None


def images_of(model: nn.Module) -> ImageSpec | None:
    """How a traced module takes images, where that isn't timm's to say; None of any other."""
    if not isinstance(model, TracedModule) or is_librarys(model):
        return None
    spec = facts_of(model).spec
    return spec if isinstance(spec, ImageSpec) else None
