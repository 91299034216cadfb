"""Models that torchvision or a function of a user's file, `module:PATH.py:function`, builds, with weights of a file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from corp_deploy.families import torchvision_models
from corp_deploy.families.given_module import architecture_of_code, user_image_spec
from corp_deploy.spec.architecture import Preprocessing
from corp_deploy.spec.trusted_code import PREFIX, Code, file_and_function
from corp_deploy.traced.models.module import is_reduced, notes_on_module
from ground.errors import BadInput
from ground.files import refuse_utf16, regular_file

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .weight_file import first_names
from .weight_fit import match_weights
from .weights import WeightChoice


def load_library_model(
    text: str, weights: Path, kwargs: Mapping[str, Any], choice: WeightChoice, preprocessing: Preprocessing
) -> Checkpoint:
    """Return the checkpoint of torchvision's model with a file's weights. Raises BadInput where these don't fit."""
    with torch.device("meta"):
        named = dense_from_architecture(torchvision_models.architecture_of_classifier(text, kwargs, preprocessing))
    read = choice.read(weights, named.state_dict().keys())
    architecture = torchvision_models.architecture_of_classifier(text, kwargs, preprocessing, read.state)
    model = dense_from_architecture(architecture)
    read = replace(read, state=torchvision_models.rename_state(architecture, model, read.state))
    load_weights(model, match_weights(model, read), where=weights)
    notes = (*read.notes, f"{weights.name}: read as {architecture.name}, images prepared as torchvision does")
    source = {"weights": weights.name, "notes": list(notes), "preprocessing": "torchvision's of these weights"}
    return Checkpoint(model=model, architecture=architecture, lineage={"source": source}, notes=notes)


def refuse_other_weights(checkpoint: Checkpoint) -> None:
    """Raise BadInput for a dense model whose weights are made by code that makes others when called again."""
    source = checkpoint.lineage.get("source", {})
    if "code" not in source or "weights" in source or is_reduced(checkpoint.model):
        return
    names = checkpoint.model.state_dict()
    again = dense_from_architecture(checkpoint.architecture).state_dict()
    other = [
        name
        for name, tensor in again.items()
        if name in names and not torch.equal(tensor.cpu().nan_to_num(), names[name].cpu().nan_to_num())
    ]
    if other:
        raise BadInput(
            f"{checkpoint.architecture.name}: the function isn't deterministic: called twice, it makes other values of "
            f"{first_names(other)}. (a) Load the trained weights inside it; (b) give them with --weights; (c) for a "
            "trial, call torch.manual_seed(0) in it first"
        )


MOST_BYTES = 1_000_000


def code_of_file(text: str) -> Code:
    path, function = file_and_function(text)
    if path.suffix != ".py" or not function.isidentifier():
        raise BadInput(f"--model {text:.200}: expected {PREFIX}PATH.py:FUNCTION, the function that makes the model")
    if not path.is_file():
        raise BadInput(f"{path}: no such file; --model {PREFIX}PATH.py:FUNCTION names the file of the model's code")
    content = regular_file(path).read_bytes()
    if len(content) > MOST_BYTES:
        raise BadInput(f"{path}: {len(content)} bytes, {MOST_BYTES} at most are kept with a model; import the rest")
    try:
        return Code(file=path.name, function=function, source=content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        refuse_utf16(content, str(path))
        raise BadInput(f"{path}: not UTF-8, expected Python's source") from None


def load_from_code(
    text: str, kwargs: Mapping[str, Any], choice: WeightChoice, preprocessing: Preprocessing
) -> Checkpoint:
    """Return the checkpoint of the model that a function of a file makes, with its own weights or those of a file.

    `preprocessing` overrides that of the model. Raises BadInput where code is not trusted, and for code, a model or
    weights that can't be used.
    """
    code = code_of_file(text)
    architecture = architecture_of_code(code, kwargs, preprocessing)
    model = dense_from_architecture(architecture)
    if (images := user_image_spec(model)) is not None:
        preprocessing.for_channels(images.shape[0])
    elif preprocessing.settings:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in preprocessing.settings)
        raise BadInput(
            f"--model {text:.200}: the function gives a model that takes no images, or a decoder; drop {options}"
        )
    notes: tuple[str, ...] = (f"{code.file}: {code.function}() was run to make the model", *notes_on_module(model))
    weights = choice.file
    if weights is None and (idle := [name for name, value in choice.settings.items() if value is not None]):
        raise BadInput(f"--model {text:.200}: {idle[0]} says which weights of a file are taken; give --weights too")
    if weights is not None:
        read = choice.read(weights, model.state_dict().keys())
        load_weights(model, match_weights(model, read), where=weights)
        notes += read.notes
    source = {"code": code.file, "sha256": code.sha256, "notes": list(notes)}
    source |= {} if weights is None else {"weights": weights.name}
    return Checkpoint(model=model, architecture=architecture, lineage={"source": source}, notes=notes)
