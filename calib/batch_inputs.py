"""Inputs in batches of a user's iterable, checked against the ports of a model and identified by content."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ground.errors import BadInput
from ground.feeds import Feeds, batch_size, checked_feeds, feeds_from_array, select_rows
from ground.ports import Port

from .batches import EQUAL, WHERE, Batches, are_pictures, array_of_entry, image_entry
from .image_arrays import Pixels
from .inputs import Inputs, OpenedInputs, ReadBatch, ids_from_hashes, map_tensors
from .rows import cut_into_rows, refuse_ids
from .sources import Transform

MOST_ROWS = 256  # rows that are looked at together
MOST_INPUTS = 2**62  # bound of a pass over a number of inputs that is not known yet


def _listed(dtypes: Mapping[str, Any]) -> str:
    return ", ".join(map(str, dtypes.values()))


def _concatenated(parts: Sequence[Feeds]) -> Feeds:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _tensor(array: NDArray[Any]) -> Tensor:
    """Return the array as a tensor, a copy if the array is read-only, as those in shared memory are."""
    return torch.from_numpy(np.require(array, requirements=("C", "W")))


def _rebatched(parts: Iterable[Feeds], size: int) -> Iterator[Feeds]:
    """Yield rows in batches of `size`, the last one smaller."""
    held, count = list[Feeds](), 0
    for part in parts:
        held.append(part)
        count += batch_size(part)
        if count < size:
            continue
        rows = _concatenated(held)
        whole = count - count % size
        for start in range(0, whole, size):
            yield select_rows(rows, slice(start, start + size))
        held, count = ([select_rows(rows, slice(whole, None))], count - whole) if count > whole else ([], 0)
    if held:
        yield _concatenated(held)


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchInputs(OpenedInputs[Inputs]):
    """Inputs of batches for a model that takes `ports`.

    Places are known after a pass over all batches, and `read` needs none. Inputs in another order than that of the
    batches are held in memory. `id_counts`: the number of ids, for ports of ids.
    """

    noun: ClassVar[str] = "inputs"

    source: Batches
    ports: tuple[Port, ...]
    id_counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def reads_once(self) -> bool:
        return self.source.is_single_pass

    @property
    def is_identified(self) -> bool:
        return self.available > 0

    def identified(self) -> Self:
        if self.is_identified:
            return self
        if self.source.total is None:
            self.source.refuse_single_pass()
            for _ in self._rows(None):
                pass
        assert self.source.total is not None
        return replace(self, available=self.source.total, places=tuple(range(self.source.total)))

    def head(self, count: int) -> Self:
        """Return the first `count` inputs of the first batch, which was looked at already."""
        rows = select_rows(self._feeds(self.source.first.inputs), slice(count))
        return replace(self, source=Batches([rows]), available=0, places=(), known={}).identified()

    def subset(self, positions: Sequence[int]) -> Self:
        found = self.identified()
        return replace(found, places=tuple(found.places[position] for position in positions))

    def sampled(self, samples: int | None, seed: int, *, where: object) -> Self:
        return self if samples is None else super(BatchInputs, self.identified()).sampled(samples, seed, where=where)

    def example(self) -> Inputs:
        return self._tensors(select_rows(self._feeds(self.source.first.inputs), slice(1)))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[ReadBatch[Inputs]]:
        stop = MOST_INPUTS if stop is None and not self.is_identified else stop
        return super().read(batch_size, first=first, stop=stop, bad=bad, pin=pin)

    def _feeds(self, inputs: Any) -> Feeds:
        """Return the arrays [B,...] of one batch by port. Raises BadInput for others than the model takes."""
        names = [port.name for port in self.ports]
        if isinstance(inputs, Mapping):
            if len(names) == 1 and names[0] not in inputs:
                inputs = {names[0]: next(iter(inputs.values()))}
            arrays = {name: self._array(inputs[name], f"{WHERE}[{name!r}]") for name in names if name in inputs}
        else:
            arrays = dict(feeds_from_array(self._array(inputs, WHERE), self.ports))
        feeds = checked_feeds(arrays, self.ports, where=WHERE)
        for name, count in self.id_counts.items():
            refuse_ids(feeds[name], count, where=f"{WHERE}: {name}: numbers", of="rows of the table of the model")
        return feeds

    def _array(self, entry: Any, where: str) -> NDArray[Any]:
        return array_of_entry(entry, where=where)

    def _tensors(self, rows: Feeds) -> Inputs:
        return {name: _tensor(array) for name, array in rows.items()}

    def _is_finite(self, rows: Feeds) -> NDArray[np.bool_]:
        finite = [
            np.isfinite(array).reshape(len(array), -1).all(1) for array in rows.values() if array.dtype.kind == "f"
        ]
        return np.logical_and.reduce(finite) if finite else np.ones(batch_size(rows), dtype=bool)

    def _rows(self, places: Sequence[int] | None) -> Iterator[Feeds]:
        """Yield the rows at these places, in the order of the batches, and remember their contents; all for None.

        Raises BadInput if another pass has other rows.
        """
        wanted, start = None if places is None else np.unique(np.asarray(places, dtype=np.int64)), 0
        dtypes: dict[str, Any] = {}
        for entries in self.source.once():
            feeds = self._feeds(entries.inputs)
            if (own := {name: array.dtype for name, array in feeds.items()}) != (dtypes := dtypes or own):
                raise BadInput(f"{WHERE}: batches of {_listed(dtypes)} and of {_listed(own)}; give all of one type")
            for begin in range(0, batch_size(feeds), MOST_ROWS):
                part = select_rows(feeds, slice(begin, begin + MOST_ROWS))
                count = batch_size(part)
                if wanted is not None:
                    rows = wanted[(wanted >= start) & (wanted < start + count)] - start
                    part = part if len(rows) == count else select_rows(part, rows)
                    where = (rows + start).tolist()
                else:
                    where = range(start, start + count)
                start += count
                if len(where):
                    self._remember(part, where)
                    yield part
            if wanted is not None and wanted[-1] < start:
                return
        if self.source.total not in (None, start):
            raise BadInput(
                f"{WHERE}: this pass has {start} {self.noun}, the first one had {self.source.total}; {EQUAL}"
            )
        self.source.total = start

    def _remember(self, rows: Feeds, places: Sequence[int]) -> None:
        for row, place in enumerate(places):
            parts = (array[row].astype(array.dtype.newbyteorder("<"), copy=False) for array in rows.values())
            content = sha256(b"".join(part.tobytes() for part in parts)).digest()
            if self.known.setdefault(place, content) != content:
                raise BadInput(f"{WHERE}: {self.noun.removesuffix('s')} {place} differs from the first pass; {EQUAL}")

    def _hashes(self, places: Sequence[int]) -> list[bytes]:
        for _ in self._rows(places):
            pass
        return [self.known[place] for place in places]

    def _loaded(self, span: range, batch_size: int, *, pin: bool) -> Iterator[ReadBatch[Inputs]]:
        places = self.places[span.start : span.stop] if self.is_identified else None
        parts = self._rows(places)
        if places is not None and any(one > other for one, other in pairwise(places)):
            parts = iter([select_rows(_concatenated(list(parts)), np.argsort(np.argsort(places)))])
        end = span.start
        for rows in _rebatched(parts, batch_size):
            at = range(end, end := end + len(next(iter(rows.values()))))
            finite = self._is_finite(rows)
            inputs = self._tensors(rows if finite.all() else select_rows(rows, np.flatnonzero(finite)))
            where = at if places is None else self.places[at.start : at.stop]
            yield ReadBatch(
                inputs=map_tensors(inputs, Tensor.pin_memory) if pin else inputs,
                ids=ids_from_hashes(self.known[place] for place, good in zip(where, finite, strict=True) if good),
                bad=tuple(
                    f"{WHERE}[{place}]: holds NaN or Inf, expected finite values"
                    for place, good in zip(where, finite, strict=True)
                    if not good
                ),
                end=end,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceBatches(BatchInputs):
    """Token ids [B,N] in batches, or one stream of ids, for a decoder."""

    noun: ClassVar[str] = "sequences"

    def _array(self, entry: Any, where: str) -> NDArray[Any]:
        array = array_of_entry(entry, where=where)
        if array.dtype.kind not in "iu":
            raise BadInput(f"{where}: got {array.dtype} {list(array.shape)}, expected whole numbers, ids of tokens")
        rows = cut_into_rows(array, self.ports[0].shape[0], where=where) if array.ndim == 1 else array
        return rows.astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageBatches(BatchInputs):
    """Images [B,C,H,W] in batches: float32 that is preprocessed, uint8 pixels, or lists of PIL images."""

    noun: ClassVar[str] = "images"

    pixels: Pixels
    transform: Callable[[], Transform]

    def _feeds(self, inputs: Any) -> Feeds:
        port = self.ports[0]
        inputs = image_entry(inputs)
        if are_pictures(inputs):
            transform = self.transform()
            inputs = torch.stack([transform(picture.convert("RGB")) for picture in inputs])
        array = array_of_entry(inputs)
        if array.dtype not in (np.float32, np.uint8) or array.shape[1:] != port.shape:
            shape = ",".join(map(str, port.shape))
            raise BadInput(
                f"{WHERE}: got {array.dtype} {list(array.shape)}, expected float32 [N,{shape}], already preprocessed, "
                "or uint8 pixels, resized and cropped"
            )
        return {port.name: array}

    def _tensors(self, rows: Feeds) -> Tensor:
        (array,) = rows.values()
        images = self.pixels()(array) if array.dtype == np.uint8 else array
        return _tensor(images)
