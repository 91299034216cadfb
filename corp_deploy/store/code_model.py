"""A model that a function of a user's file makes: `module:PATH.py:function`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from corp_deploy.families.custom_modules import architecture_of, images_of
from corp_deploy.families.preprocessing import Preprocessing
from corp_deploy.families.trusted_code import PREFIX, Code, file_and_function
from ground.errors import BadInput
from ground.files import regular_file

from .checkpoint import Checkpoint, dense_from_architecture, load_weights
from .weight_fit import require_fit
from .weights import read_weights

MOST_BYTES = 1_000_000


def _code(text: str) -> Code:
    path, function = file_and_function(text)
    if path.suffix != ".py" or not function.isidentifier():
        raise BadInput(f"--model {text:.200}: expected {PREFIX}PATH.py:FUNCTION, the function that makes the model")
    if not path.is_file():
        raise BadInput(f"{path}: no such file; --model {PREFIX}PATH.py:FUNCTION names the file of the model's code")
    content = regular_file(path).read_bytes()
    if len(content) > MOST_BYTES:
        raise BadInput(f"{path}: {len(content)} bytes, {MOST_BYTES} at most are kept with a model; import the rest")
    try:
        return Code(file=path.name, function=function, source=content.decode())
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not UTF-8, expected Python's source") from None


def _refuse_unfit(model: nn.Module, preprocessing: Preprocessing, text: str) -> None:
    """Raise BadInput for a mean or a std of other channels, and for any of a model that takes no images."""
    if (images := images_of(model)) is not None:
        preprocessing.for_channels(images.shape[0])
    elif preprocessing.settings:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in preprocessing.settings)
        raise BadInput(
            f"--model {text:.200}: the function gives a model that takes no images, or a decoder; drop {options}"
        )


def load_from_code(
    text: str, weights: Path | None, kwargs: Mapping[str, Any], ema: bool | None, preprocessing: Preprocessing
) -> Checkpoint:
    """What the function gives for these arguments, with its own weights or those of a file; `preprocessing` goes
    before what was said with the sites. Raises BadInput where code isn't trusted, and for code, a model or weights
    that will not do.
    """
    code = _code(text)
    architecture = architecture_of(code, kwargs, preprocessing)
    model = dense_from_architecture(architecture)
    _refuse_unfit(model, preprocessing, text)
    notes: tuple[str, ...] = (f"{code.file}: {code.function}() was run to make the model",)
    if weights is not None:
        read = read_weights(weights, ema=ema)
        require_fit(model, read)
        load_weights(model, read.state, where=weights)
        notes += read.notes
    source = {"code": code.file, "sha256": code.sha256, "notes": list(notes)}
    if weights is not None:
        source["weights"] = weights.name
    return Checkpoint(model=model, architecture=architecture, lineage={"source": source}, notes=notes)
