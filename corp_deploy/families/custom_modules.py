"""Builds custom modules: models that a user's code makes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from corp_deploy.traced.models.module import TracedModule, facts_of, is_librarys, traced_state
from ground.errors import BadInput

from .architecture import Architecture, Preprocessing
from .timm_images import ImageSpec
from .trusted_code import FAMILY, Code

NAME = FAMILY


def architecture_of(code: Code, arguments: Mapping[str, Any], preprocessing: Preprocessing) -> Architecture:
    """What config.json keeps: the source itself, so that a directory needs no other file."""
    kwargs = {"source": code.source, "arguments": dict(arguments)}
    name = f"{code.file}:{code.function}"
    return Architecture(name=name, kwargs=kwargs, preprocessing=preprocessing, family=NAME)


def build(architecture: Architecture) -> nn.Module:
    """What the code makes, on the CPU whatever torch's default device is, since it may look at values: a module
    with named sites or any other. Raises BadInput where code isn't trusted, and for what is no module.
    """
    file, function = architecture.name.rsplit(":", 1) if ":" in architecture.name else (architecture.name, "")
    source, arguments = architecture.kwargs.get("source"), architecture.kwargs.get("arguments")
    if not isinstance(source, str) or not isinstance(arguments, Mapping):
        raise BadInput(f"{architecture.name}: no source and arguments of a model's code; write the model again")
    code = Code(file=file, function=function, source=source)
    with torch.device("cpu"):
        model = code.called(dict(arguments))
    if not isinstance(model, nn.Module):
        raise BadInput(f"{code.file}: {code.function}() gives a {type(model).__name__}, expected a torch.nn.Module")
    if (spec := images_of(model)) is not None:
        state = traced_state(model)
        settings = architecture.preprocessing.spread(spec.shape[0]).settings
        state.facts = replace(facts_of(model), spec=replace(spec, config={**spec.config, **settings}))
    return model.eval().requires_grad_(False)


def images_of(model: nn.Module) -> ImageSpec | None:
    """How a traced module takes images, where that isn't timm's to say; None of any other."""
    if not isinstance(model, TracedModule) or is_librarys(model):
        return None
    spec = facts_of(model).spec
    return spec if isinstance(spec, ImageSpec) else None
