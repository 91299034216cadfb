"""Class indices of images from arrays, lists, tables, names, columns beside the images, and class folders."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from calib.batches import Batches
from calib.images import Images
from calib.inputs import InputSet
from calib.sources import Folder, RemoteFolder
from corp_deploy.spec.class_labels import FOLDERS, KINDS, class_folder
from corp_deploy.traced.models.module import classes as classes_of
from ground.arrays import array_from_file
from ground.errors import BadInput
from ground.files import text_from_file
from ground.records import record_from_text

LABEL_COLUMNS = ("label", "labels", "class", "class_index", "target", "y")
NAME_COLUMNS = ("file", "filename", "file_name", "name", "image", "image_id", "path", "id")
TEXTS = (".txt", ".csv", ".tsv")
MOST_BYTES = 2**26
SHOWN = 20  # the number of folders whose class is noted
Named = Mapping[str, Any]  # labels by the names of files, or of the folders that have the images


def labels_for(
    labels: Any, images: InputSet, model: nn.Module, note: Callable[[str], None] = lambda text: None
) -> NDArray[np.int64]:
    """Return the class index of each of `images`, int64 [N].

    `labels` is a path of a kind that LABELS_HELP lists, or values for all images in order (array, tensor, list) or by
    name. `note` is called with the class that each folder stands for. Raises BadInput for other labels, and for inputs
    that are no images.
    """
    is_path = isinstance(labels, str | os.PathLike)
    where = os.fspath(labels) if is_path else "labels"
    if images.noun != Images.noun:
        raise BadInput(f"{where}: labels are for images, the model takes {images.noun}; leave them out")
    classes = classes_of(model)
    if not classes:
        raise BadInput(f"{where}: the model has no classifier, so labels can't judge its outputs; leave them out")
    values = _named(Path(where), images, max(classes, 2), note) if is_path else labels
    if isinstance(values, Mapping):
        return _in_range(_indices(_by_name(values, images, where), classes, where), classes, where)
    indices = _indices(values, classes, where)
    if len(indices) != images.available:
        raise BadInput(f"{where}: {len(indices)} labels for {images.available} images; give one label an image")
    chosen: NDArray[np.int64] = _in_range(indices, classes, where)[np.asarray(images.places)]
    return chosen


def _named(path: Path, images: InputSet, classes: int, note: Callable[[str], None]) -> Any:
    """Return the values of a file or, if there is none, of the column or the class folders that its name stands for."""
    source = images.source if isinstance(images, Images) else None
    columns = () if source is None else source.label_columns
    if path.exists():
        return _from_file(path)
    if source is not None and path.name in columns:
        return source.labels(path.name)
    if path.name == FOLDERS:
        return _of_folders(images, classes, note)
    named = f", or a column of the images: {', '.join(columns)[:200]}" if columns else ""
    raise BadInput(f"{path}: no such file, expected labels: {KINDS}, or the word {FOLDERS}{named}")


def labels_in_batches(batches: Batches, images: InputSet, model: nn.Module) -> NDArray[np.int64] | None:
    """Return the labels that came with the batches, which were read; None without any or for a model of no classes."""
    if batches.labels is None or not classes_of(model):
        return None
    return labels_for(batches.labels, images.identified(), model)


def _from_file(path: Path) -> Any:
    if path.suffix.lower() == ".json":
        remedy = "expected a list of class indices, or an object with one for each file name"
        text = text_from_file(path, most_bytes=MOST_BYTES)
        values: Any = record_from_text(text, list[Any] | dict[str, Any], where=str(path), remedy=remedy)  # type: ignore[arg-type]
        return values["labels"] if isinstance(values, dict) and isinstance(values.get("labels"), list) else values
    if path.suffix.lower() in TEXTS:
        return _from_text(text_from_file(path, most_bytes=MOST_BYTES), path)
    try:
        return array_from_file(path, "labels")
    except BadInput as error:
        raise BadInput(f"{error}; expected labels in .npy, or under key labels in .npz") from None


def _from_text(text: str, path: Path) -> list[Any] | Named:
    """Return the list of labels, one a line, or the labels by name of a table with a name and a label in each row."""
    lines = [line for line in text.splitlines() if line.strip()]
    delimiter = next((each for each in "\t,;" if lines and each in lines[0]), None)
    split = (line.rsplit(None, 1) for line in lines) if delimiter is None else csv.reader(lines, delimiter=delimiter)
    try:
        rows = [[cell.strip() for cell in row] for row in split]
    except csv.Error as error:
        raise BadInput(f"{path}: not a valid table ({error})") from None
    if not rows:
        raise BadInput(f"{path}: holds no labels, expected one a line")
    header = [cell.lower() for cell in rows[0]]
    name_column, label_column = (None if len(header) == 1 else 0), len(header) - 1
    column = next((header.index(each) for each in LABEL_COLUMNS if each in header), None)
    if column is not None:
        name_column = next((header.index(each) for each in NAME_COLUMNS if each in header), None)
        rows, label_column = rows[1:], column
    elif len(header) > 2 or (len(header) == 2 and _parse_number(header[1]) is None):
        raise BadInput(
            f"{path}: columns {', '.join(rows[0])[:150]}; expected a header with a column for the label "
            f"({', '.join(LABEL_COLUMNS)}), and one for the file ({', '.join(NAME_COLUMNS)}) unless rows are in order"
        )
    width = max(name_column or 0, label_column) + 1
    if short := next((number for number, row in enumerate(rows, 1 + (column is not None)) if len(row) < width), None):
        raise BadInput(f"{path}: row {short} has too few columns; give every row a label")
    values = [_number(row[label_column], path) for row in rows]
    if name_column is None:
        return values
    names = [row[name_column] for row in rows]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise BadInput(f"{path}: {twice[:100]!r} has more than one label; give each file one")
    return dict(zip(names, values, strict=True))


def _parse_number(text: str) -> float | None:
    word = {"true": "1", "false": "0"}.get(text.lower(), text)
    try:
        return int(word) if word.lstrip("+-").isdecimal() else float(word)
    except ValueError:
        return None


def _number(text: str, path: Path) -> float:
    number = _parse_number(text)
    if number is None:
        raise BadInput(
            f"{path}: got {text[:60]!r}, expected a class index; to give classes by name, put images into folders "
            'named after them and give a .json file such as {"cat": 0, "dog": 1}'
        )
    return number


def _indices(values: Any, classes: int, where: str) -> NDArray[np.int64]:
    """Return class indices, int64 [N], of whole numbers, booleans, floats with whole values, or one-hot rows."""
    expected = f"expected whole numbers [N], or one-hot rows [N,{classes}]"
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{where}: got {type(values).__name__} of unlike values, {expected}") from None
    got = f"{where}: got {array.dtype} {list(array.shape)}"
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2) or not array.size:
        raise BadInput(f"{got}, {expected}")
    if not (np.isfinite(array) & (array == np.trunc(array.astype(np.float64)))).all():
        raise BadInput(f"{got} with fractions, {expected}: class indices, not probabilities")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 2:
        if array.shape[1] != classes or ((array != 0) & (array != 1)).any() or (array.sum(1) != 1).any():
            raise BadInput(f"{got}, {expected}: of each row one is 1, all others 0")
        array = array.argmax(1)
    return array.astype(np.int64)


def _in_range(indices: NDArray[np.int64], classes: int, where: str) -> NDArray[np.int64]:
    most = max(classes - 1, 1)
    if indices.min() < 0 or indices.max() > most:
        order = f"class indices in the order of the model's {classes} outputs"
        what = "the model has one logit, and 1 stands for a positive one" if classes == 1 else order
        raise BadInput(f"{where}: labels from {indices.min()} to {indices.max()}, expected 0 to {most}: {what}")
    return indices


def _by_name(labels: Named, images: InputSet, where: str) -> list[Any]:
    """Return the label of each image, by its name, its file's name with or without suffix, or its class folder."""
    given = {str(name).replace("\\", "/").removeprefix("./"): label for name, label in labels.items()}
    every = [images.name_of_place(place) for place in range(images.available)]
    own = Counter(name.rpartition("/")[2] for name in every)
    by_own = Counter(name.rpartition("/")[2] for name in given)
    bare = {name.rpartition("/")[2]: label for name, label in given.items() if by_own[name.rpartition("/")[2]] == 1}

    def label(name: str) -> Any:
        last = name.rpartition("/")[2]
        if name in given:
            return given[name]
        if own[last] == 1:
            for key in (last, os.path.splitext(last)[0]):
                if key in bare:
                    return bare[key]
        return given.get(class_folder(name))

    names = [images.name(position) for position in range(images.count)]
    found = [label(name) for name in names]
    if missing := [name for name, each in zip(names, found, strict=True) if each is None]:
        raise BadInput(
            f"{where}: no label for {len(missing)} of {images.count} images, such as {', '.join(missing[:3])[:200]}; "
            f"the labels name {', '.join(list(given)[:3])[:200] or 'nothing'}"
        )
    return found


def _of_folders(images: InputSet, classes: int, note: Callable[[str], None]) -> list[int]:
    """Return the index of each image's folder among all folders, sorted as in torchvision's ImageFolder."""
    source = images.source if isinstance(images, Images) else None
    folders = [class_folder(name) for name in source.names] if isinstance(source, Folder | RemoteFolder) else []
    if not all(folders) or not folders:
        raise BadInput(
            "labels by folders: the images are in no class folders; put the images of each class into one folder"
        )
    order = sorted(set(folders))
    if len(order) != classes:
        names = ", ".join(order[:5])[:150] + ", ..." * (len(order) > 5)
        raise BadInput(
            f"labels by folders: {len(order)} folders ({names}) for {classes} classes, so which class each stands for "
            f"is not known; give a .json file with a class index for each folder, such as {json.dumps({order[0]: 0})}"
        )
    shown = [f"{name} is {index}" for index, name in enumerate(order)]
    note(f"labels by folders: {', '.join(shown if len(shown) <= SHOWN else [*shown[:SHOWN], '...', shown[-1]])}")
    indices = {name: index for index, name in enumerate(order)}
    return [indices[folder] for folder in folders]
