"""Inputs of a model, from files or from memory."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor, nn

from calib.inputs import InputSet
from corp_deploy.store.inputs import inputs_for_model
from ground.errors import BadInput

from .source import Array as Array
from .source import InputsLike as InputsLike

IN_MEMORY = "inputs.npy"  # the same name wherever an array comes from: names are part of digests


def _array(values: Array) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


@contextmanager
def on_disk(values: InputsLike, *, name: str = IN_MEMORY) -> Iterator[Path]:
    """The path itself, or that of a file with the array for as long as the context is open."""
    if isinstance(values, str | os.PathLike):
        yield Path(values)
        return
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / name
        if isinstance(values, Mapping):
            path = path.with_suffix(".safetensors")
            save_file({key: np.ascontiguousarray(_array(each)) for key, each in values.items()}, path)
        else:
            np.save(path, _array(values), allow_pickle=False)
        try:
            yield path
        except BadInput as error:
            error.args = (str(error).replace(str(path), path.stem),)
            raise


@contextmanager
def opened_inputs(model: nn.Module, inputs: InputsLike, **how: Any) -> Iterator[InputSet]:
    """What the model takes, of a path or of an array: images, or texts of a file, or token ids of a decoder, or arrays
    by the names of its inputs; `how` they are drawn and decoded. Raises BadInput for what it doesn't take.
    """
    with on_disk(inputs) as path:
        yield inputs_for_model(model, path, **how)
