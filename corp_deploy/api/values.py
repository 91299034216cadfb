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
from torch.utils.data import Dataset

from calib.batch_inputs import MOST_INPUTS
from calib.batches import Batches, DatasetBatches, are_pictures, array_of_entry, has_images, image_entry, is_dataset
from calib.saved_datasets import write_parquet
from corp_deploy.invocation.option import Labels
from ground.errors import BadInput
from ground.files import sha256_of_file, write_json
from ground.places import Place, place_from_text
from ground.transaction import install_files

Array: TypeAlias = NDArray[Any] | Tensor
InputsLike: TypeAlias = str | os.PathLike[str] | NDArray[Any] | Tensor | Mapping[str, Array] | Iterable[Any]
IN_MEMORY = "inputs.npy"  # a fixed name, as names are part of digests


ACCEPTED = (
    "a path or URL (a folder of images, tar shards, parquet files, a directory of datasets.save_to_disk, .npy, .npz, "
    ".safetensors), an array or tensor [N,...] of float32 (preprocessed) or uint8, a mapping from the names of inputs "
    "to these, or an iterable of batches, such as a DataLoader"
)


def _refused(values: object, why: str, name: str) -> BadInput:
    remedy = "; give DataLoader(DATASET, batch_size=32)" if isinstance(values, Dataset) else ""
    return BadInput(f"{name}: got {type(values).__name__}{why}, expected {ACCEPTED}{remedy}")


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


def _are_rows(values: object) -> bool:
    """Return whether a list or tuple has the rows of one array: numbers, lists, or single images [C,H,W]."""
    if not isinstance(values, list | tuple):
        return False
    first = values[0] if values else 0
    is_nested = isinstance(first, list | tuple) and all(isinstance(each, int | float) for each in first)
    return isinstance(first, int | float) or is_nested or getattr(first, "ndim", 0) in (1, 3) or not values


def given_inputs(values: InputsLike | Batches, *, name: str = "inputs", labels: str | None = None) -> Place | Batches:
    """Return a path, or what is in memory as batches whose first was looked at; `labels` names an entry of dicts.

    Raises BadInput, which begins with `name`, for objects that no function takes as inputs.
    """
    if isinstance(values, str | os.PathLike):
        return place_from_text(values)
    if isinstance(values, Batches):
        return values
    if isinstance(values, Mapping):
        if not values or not all(isinstance(key, str) for key in values):
            raise _refused(values, " without names" if values else " that is empty", name)
        return Batches([{key: _array(each, f"{name}[{key!r}]") for key, each in values.items()}])
    if are_pictures(values):
        return Batches([values])
    if isinstance(values, Tensor | np.ndarray) or _are_rows(values):
        return Batches([_array(values, name)])
    if is_dataset(values):
        return Batches(DatasetBatches(values), labels=labels, where=name)
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        raise _refused(values, "", name)
    return Batches(values, labels=labels, where=name)


def entry_of_labels(labels: Labels | None, inputs: InputsLike) -> str | None:
    """Return labels that name an entry of batches in memory, None for those of another kind."""
    in_files = isinstance(inputs, str | os.PathLike) or (is_dataset(inputs) and DatasetBatches(inputs).has_images)
    named = isinstance(labels, str) and not in_files and not Path(labels).is_file()
    return labels if named and isinstance(labels, str) else None


def _write_inputs(values: Batches, path: Path, most: int) -> Path:
    """Write the first `most` inputs of batches: .npy, .safetensors for several arrays, .parquet for stored images."""
    if values.dataset is not None:
        path = path.with_suffix(".parquet")
        write_parquet(values.dataset, path, most)
        return path
    first = values.first.inputs
    if isinstance(first, Mapping) and len(first) > 1 and not has_images(first):
        path = path.with_suffix(".safetensors")
        parts = [{key: array_of_entry(each) for key, each in entries.inputs.items()} for entries in values.once()]
        save_file({key: np.concatenate([part[key] for part in parts])[:most] for key in parts[0]}, path)
        return path
    with path.open("wb") as file:
        count = 0
        for entries in values.once():
            rows = np.ascontiguousarray(array_of_entry(image_entry(entries.inputs))[: most - count])
            form = {"descr": rows.dtype.str, "fortran_order": False, "shape": (count, *rows.shape[1:])}
            if not count:
                np.lib.format.write_array_header_1_0(file, form)
            count += len(rows)
            file.write(rows.data)
            if count >= most:
                break
        file.seek(0)  # the header has room for any number of rows
        np.lib.format.write_array_header_1_0(file, form | {"shape": (count, *rows.shape[1:])})
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
) -> Iterator[Any]:
    if isinstance(values, str | os.PathLike):
        yield place_from_text(values)
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


def as_file(
    values: InputsLike | Batches, *, name: str = IN_MEMORY, folder: Path | None = None, most: int = MOST_INPUTS
) -> AbstractContextManager[Place]:
    """Return a context with a place as it is, or that of a file with `most` inputs: .npy, or .safetensors for several.

    Without a `folder` for it the file is temporary; a file in the folder is replaced only if its content differs.
    """
    given = given_inputs(values, name=Path(name).stem)
    return _as_file(given, lambda batches, path: _write_inputs(batches, path, most), name, folder)


def labels_as_file(labels: Labels, folder: Path) -> AbstractContextManager[Place]:
    """Return a context with a path as it is, or that of labels.npy (labels.json for a mapping) in the folder."""
    return _as_file(labels, _write_labels, "labels.npy", folder)


def install_changed(scratch: Path, folder: Path) -> None:
    """Move the files below `scratch` to the same names in `folder`, except those that have the same content there."""
    new = {path.relative_to(scratch).as_posix(): path for path in scratch.rglob("*") if path.is_file()}
    digests = {name: sha256_of_file(folder / name) for name in new if (folder / name).is_file()}
    moves = {name: path for name, path in new.items() if digests.get(name) != sha256_of_file(path)}
    install_files(folder, moves)
