"""Inputs and labels of functions: a path, or values in memory, which become a file of a fixed name."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from corp_deploy.invocation.option import Labels
from ground.errors import BadInput
from ground.files import sha256_of_file, write_json
from ground.transaction import install_files

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


def _array(values: object, name: str) -> NDArray[Any]:
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


def refuse_other_inputs(inputs: object, name: str = "inputs") -> None:
    """Raise BadInput, which begins with `name`, for objects that no function takes as inputs."""
    if isinstance(inputs, Mapping):
        if not inputs or not all(isinstance(key, str) for key in inputs):
            raise _refused(inputs, " without names" if inputs else " that is empty", name)
        for key, each in inputs.items():
            _array(each, f"{name}[{key!r}]")
    elif not isinstance(inputs, str | os.PathLike):
        _array(inputs, name)


def _write_inputs(values: Any, path: Path) -> Path:
    if not isinstance(values, Mapping):
        np.save(path, _array(values, path.stem), allow_pickle=False)
        return path
    path = path.with_suffix(".safetensors")
    save_file({key: np.ascontiguousarray(_array(each, key)) for key, each in values.items()}, path)
    return path


def _write_labels(labels: Any, path: Path) -> Path:
    if not isinstance(labels, Mapping):
        np.save(path, _array(labels, path.stem), allow_pickle=False)
        return path
    path = path.with_suffix(".json")
    write_json(path, {str(name): int(_array([label], "labels")[0]) for name, label in labels.items()})
    return path


@contextmanager
def _as_file(
    values: Any, write: Callable[[Any, Path], Path], name: str = IN_MEMORY, folder: Path | None = None
) -> Iterator[Path]:
    if isinstance(values, str | os.PathLike):
        yield Path(values)
        return
    with TemporaryDirectory(dir=folder) as scratch:
        path = write(values, Path(scratch) / name)
        if folder is not None:
            install_changed(Path(scratch), folder)
            path = folder / path.name
        try:
            yield path
        except BadInput as error:
            error.args = (str(error).replace(f"--images {path}", path.stem).replace(str(path), path.stem),)
            raise


def as_file(values: InputsLike, *, name: str = IN_MEMORY, folder: Path | None = None) -> AbstractContextManager[Path]:
    """Return a context with a path as it is, or the path of a file with arrays: .npy, or .safetensors for a mapping.

    Without a `folder` for it the file is temporary; a file in the folder is replaced only if its content differs.
    """
    if not isinstance(values, str | os.PathLike):
        refuse_other_inputs(values, Path(name).stem)
    return _as_file(values, _write_inputs, name, folder)


def labels_as_file(labels: Labels, folder: Path) -> AbstractContextManager[Path]:
    """Return a context with a path as it is, or that of labels.npy (labels.json for a mapping) in the folder."""
    return _as_file(labels, _write_labels, "labels.npy", folder)


def install_changed(scratch: Path, folder: Path) -> None:
    """Move the files below `scratch` to the same names in `folder`, except those that have the same content there."""
    new = {path.relative_to(scratch).as_posix(): path for path in scratch.rglob("*") if path.is_file()}
    digests = {name: sha256_of_file(folder / name) for name in new if (folder / name).is_file()}
    moves = {name: path for name, path in new.items() if digests.get(name) != sha256_of_file(path)}
    install_files(folder, moves)
