"""Batches of a user's own iterable, such as a DataLoader, as inputs that are identified by content.

Every pass over the iterable draws the same random numbers, so that shuffling and augmentation repeat themselves.
"""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from ground.errors import BadInput

WHERE = "inputs"
EQUAL = "(a) turn augmentation off, or (b) give a list, whose batches stay as they are"
BATCH = "a batch is a tensor or array [B,...], or a tuple or dict whose first entry is one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The inputs of one batch, an array or several by name, and its labels, if it has any."""

    inputs: Any
    labels: Any = None


def entries_of_batch(batch: Any, labels: str | None) -> Entries:
    """Split a batch: of a tuple the first entry is the input and the second the labels; of a dict `labels` names them.

    Raises BadInput for a batch that is empty or lacks the named labels.
    """
    if isinstance(batch, Mapping):
        inputs = {name: each for name, each in batch.items() if name != labels}
        if not inputs or (labels is not None and labels not in batch):
            what = "no entry" if not inputs else f"no entry {labels!r} for labels, only {', '.join(map(str, batch))}"
            raise BadInput(f"{WHERE}: a batch has {what}; {BATCH}")
        return Entries(inputs=inputs, labels=None if labels is None else batch[labels])
    if isinstance(batch, tuple | list) and not are_pictures(batch):
        if not len(batch):
            raise BadInput(f"{WHERE}: a batch is an empty {type(batch).__name__}; {BATCH}")
        first = batch[0]
        inputs = dict(first) if isinstance(first, Mapping) else first
        return Entries(inputs=inputs, labels=batch[1] if len(batch) > 1 else None)
    return Entries(inputs=batch)


def are_pictures(values: Any) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(isinstance(each, Image.Image) for each in values)


class DatasetBatches:
    """The rows of a datasets.Dataset in batches; with images, single rows that decode, for a look at one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.has_images = any(type(each).__name__ == "Image" for each in dataset.features.values())

    def __iter__(self) -> Iterator[Any]:
        return self._decoded() if self.has_images else iter(self.dataset.with_format("numpy").iter(batch_size=32))

    def _decoded(self) -> Iterator[Any]:
        decoded = None
        for row in range(len(self.dataset)):
            try:
                decoded = self.dataset[row : row + 1]
            except (OSError, SyntaxError, ValueError):  # counted as a bad row where its bytes are read
                continue
            yield decoded
        if decoded is None and len(self.dataset):
            raise BadInput(
                f"{WHERE}: none of the data set's {len(self.dataset)} images can be decoded; check its files"
            )


def is_dataset(values: object) -> bool:
    """Return whether this is a datasets.Dataset, which yields rows; never imports datasets."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(values, datasets.Dataset)


class _RandomStates:
    """The states of the random generators that loaders and transforms draw from."""

    def __init__(self, iterable: object) -> None:
        self._own = iterable.generator if isinstance(iterable, DataLoader) else None

    def read(self) -> tuple[Any, ...]:
        own = None if self._own is None else self._own.get_state()
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), own

    def write(self, states: tuple[Any, ...]) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if self._own is not None:
            self._own.set_state(states[3])

    @contextmanager
    def swapped(self, states: list[tuple[Any, ...]]) -> Iterator[None]:
        """Use the last of `states` in the body, append the state after it, and restore the caller's."""
        outer = self.read()
        self.write(states[-1])
        try:
            yield
        finally:
            states[:] = [self.read()]
            self.write(outer)


class Batches:
    """An iterable of batches whose first batch was looked at. Its passes repeat the same random numbers.

    `labels` names the labels in batches that are dicts. `total` is the number of inputs, None before the end of a pass.
    Raises BadInput for an iterable without a batch.
    """

    def __init__(self, iterable: Iterable[Any], *, labels: str | None = None, where: str = WHERE) -> None:
        self._iterable, self._name = iterable, labels
        self.total: int | None = None
        self._labels: list[NDArray[Any] | None] = []
        self._random = _RandomStates(iterable)
        self._states = self._random.read()
        self._begun: Iterator[Any] | None = self._raw()
        self.is_single_pass = isinstance(iterable, Iterator)
        try:
            self._first = next(self._begun)
        except StopIteration:
            raise BadInput(f"{where}: got {type(iterable).__name__} without a batch, expected at least one") from None
        self.first = entries_of_batch(self._first, labels)

    def _raw(self) -> Iterator[Any]:
        states = [self._states]
        with self._random.swapped(states):
            iterator = iter(self._iterable)
        while True:
            with self._random.swapped(states):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    @property
    def dataset(self) -> Any:
        """The datasets.Dataset whose column of images these are; None for other batches."""
        own = self._iterable
        return own.dataset if isinstance(own, DatasetBatches) and own.has_images else None

    @property
    def labels(self) -> NDArray[Any] | None:
        """The labels of all inputs after a whole pass; None unless every batch has some."""
        labels = [each for each in self._labels if each is not None]
        return np.concatenate(labels) if labels and len(labels) == len(self._labels) else None

    def refuse_single_pass(self) -> None:
        if self.is_single_pass:
            raise BadInput(
                f"{WHERE}: a {type(self._iterable).__name__} yields its batches once, and they are read more than once "
                "here; give a list, a DataLoader, or another iterable that starts again"
            )

    def once(self) -> Iterator[Entries]:
        """Yield the entries of every batch. Raises BadInput if batches that can be read only once were read before."""
        begun, self._begun = self._begun, None
        if begun is None:
            self.refuse_single_pass()
        labels = list[NDArray[Any] | None]()
        for batch in self._raw() if begun is None else chain([self._first], begun):
            entries = entries_of_batch(batch, self._name)
            labels.append(_label_array(entries.labels))
            yield entries
        self._labels = labels


def _label_array(labels: Any) -> NDArray[Any] | None:
    """Return whole numbers [B] as an array, None for other entries."""
    if not isinstance(labels, Tensor | np.ndarray | list | tuple):
        return None
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    except (TypeError, ValueError, RuntimeError):
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biu" else None


def array_of_entry(values: Any, *, where: str = WHERE) -> NDArray[Any]:
    """Return a tensor or array [B,...] on the CPU as an array. Raises BadInput for anything else."""
    if not isinstance(values, Tensor | np.ndarray):
        raise BadInput(f"{where}: got {type(values).__name__}; {BATCH}")
    try:
        array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
    except (TypeError, RuntimeError) as error:  # numpy has no such type
        first = str(error).splitlines()[0][:100]
        raise BadInput(f"{where}: got {type(values).__name__} ({first}); {BATCH}") from None
    if array.dtype.kind not in "biufc" or not array.ndim:
        raise BadInput(f"{where}: got {type(values).__name__} of {array.dtype} {list(array.shape)}; {BATCH}")
    return array


def image_entry(inputs: Any) -> Any:
    """Return the first entry of a dict that is a batch of images, else its first entry; other inputs as they are."""
    if not isinstance(inputs, Mapping):
        return inputs
    return next((each for each in inputs.values() if _are_images(each)), next(iter(inputs.values())))


def has_images(inputs: Mapping[str, Any]) -> bool:
    return any(map(_are_images, inputs.values()))


def _are_images(entry: Any) -> bool:
    return are_pictures(entry) or (isinstance(entry, Tensor | np.ndarray) and entry.ndim == 4)
