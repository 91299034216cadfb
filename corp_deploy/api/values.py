"""Inputs of functions: a path, or arrays in memory, which become a file of a fixed name."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from ground.errors import BadInput

Array: TypeAlias = NDArray[Any] | Tensor
InputsLike: TypeAlias = str | os.PathLike[str] | NDArray[Any] | Tensor | Mapping[str, Array]
IN_MEMORY = "inputs.npy"  # a fixed name, as names are part of digests


ACCEPTED = (
    "a path (a folder of images, tar shards, .npy, .npz, .safetensors), an array or tensor [N,...] of float32 "
    "(preprocessed) or uint8, or a mapping from the names of inputs to these"
)


def _refused(values: object, why: str, name: str) -> BadInput:
    several = isinstance(values, Iterable) and not isinstance(values, Tensor | np.ndarray | bytes)
    remedy = "; collect what it yields into one tensor, such as torch.cat(batches), or save the images to a folder"
    return BadInput(f"{name}: got {type(values).__name__}{why}, expected {ACCEPTED}{remedy if several else ''}")


def _array(values: object, name: str = "inputs") -> NDArray[Any]:
    """Return numbers in memory as an array; raise BadInput for other objects, without iterating over them."""
    if not isinstance(values, Tensor | np.ndarray | list | tuple):
        raise _refused(values, "", name)
    rows = values if isinstance(values, list | tuple) else ()
    if odd := next(
        (each for each in rows if not isinstance(each, Tensor | np.ndarray | list | tuple | int | float)), None
    ):
        raise _refused(values, f" of {type(odd).__name__}", name)
    try:
        array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:  # numpy has no such type, or rows are unlike
        raise _refused(values, f" ({str(error).splitlines()[0]:.100})", name) from None
    if array.dtype.kind not in "biufc":
        raise _refused(values, f" of {array.dtype}", name)
    return array


def refuse_other_inputs(inputs: object) -> None:
    """Raise BadInput for objects that no function takes as inputs."""
    if isinstance(inputs, Mapping):
        if not inputs or not all(isinstance(name, str) for name in inputs):
            raise _refused(inputs, " without names" if inputs else " that is empty", "inputs")
        for name, each in inputs.items():
            _array(each, f"inputs[{name!r}]")
    elif not isinstance(inputs, str | os.PathLike):
        _array(inputs)


@contextmanager
def as_file(values: InputsLike) -> Iterator[Path]:
    """Yield a path as it is, or the path of a temporary file with arrays: .npy, or .safetensors for a mapping."""
    if isinstance(values, str | os.PathLike):
        yield Path(values)
        return
    refuse_other_inputs(values)
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / IN_MEMORY
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
