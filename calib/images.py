"""Images for a model: opened once, identified by content, read in order as batches [B,3,H,W] float32."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ground.errors import BadInput

from .inputs import Batch, ids_and_digest, sampled_positions
from .shards import shards_from_pattern
from .sources import ImageShape, Pixels, Source, Transform, array_from_path, folder_from_path

ARRAYS = (".npy", ".npz", ".safetensors")
NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(Dataset[tuple[int, Tensor | str]]):
    """The chosen images; one that can't be read is its reason instead."""

    source: Source
    chosen: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, position: int) -> tuple[int, Tensor | str]:
        try:
            return position, self.source.image(self.chosen[position])
        except BadInput as error:
            return position, str(error)


class _Loaded(NamedTuple):
    """What a decode worker hands over: good images [B,3,H,W] with their positions, reasons of bad ones, the end."""

    images: Tensor
    positions: list[int]
    bad: list[str]
    end: int


def _loaded_from_rows(rows: list[tuple[int, Tensor | str]]) -> _Loaded:
    good = [(position, row) for position, row in rows if isinstance(row, Tensor)]
    return _Loaded(
        images=torch.stack([row for _, row in good]) if good else torch.empty(0),
        positions=[position for position, _ in good],
        bad=[row for _, row in rows if isinstance(row, str)],
        end=rows[-1][0] + 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Opened images: `ids` [count] int64 are hashes of each one's content, `digest` covers names and contents."""

    noun: ClassVar[str] = "images"

    rows: _Rows
    shape: ImageShape
    ids: Tensor
    digest: str
    workers: int
    max_bad: int

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def available(self) -> int:
        return len(self.rows.source)

    @property
    def places(self) -> tuple[int, ...]:
        return self.rows.chosen

    def name(self, position: int) -> str:
        return self.rows.source.name(self.rows.chosen[position])

    def example(self) -> Tensor:
        """One black image."""
        return torch.zeros(1, *self.shape)

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """All images in order; the last batch may be smaller. Raises BadInput beyond `max_bad` unreadable images."""
        return (batch.inputs for batch in self.read(batch_size) if len(batch.ids))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[Batch[Tensor]]:
        """Positions `first` to `stop` with what identifies them; `bad` are the ones met before `first`.

        `pin` puts images into page-locked memory, from which a copy to a GPU doesn't wait.
        """
        if batch_size < 1:
            raise BadInput(f"batch size: got {batch_size}, expected at least 1")
        span = range(first, self.count if stop is None else stop)
        met = list(bad)
        for loaded in self._loader(span, batch_size, pin=pin):
            met.extend(loaded.bad)
            self.refuse_bad(met)
            ids = self.ids[loaded.positions]
            yield Batch(inputs=loaded.images, ids=ids, bad=tuple(loaded.bad), end=loaded.end)

    def _loader(self, span: range, batch_size: int, *, pin: bool) -> Iterable[_Loaded]:
        return DataLoader(
            Subset(self.rows, span),
            batch_size=batch_size,
            num_workers=self.workers,
            collate_fn=_loaded_from_rows,
            pin_memory=pin,
        )

    def refuse_bad(self, bad: Sequence[str]) -> None:
        """Raises BadInput with the reasons of the first ones when `bad` are more than `max_bad`."""
        if len(bad) > self.max_bad:
            more = f"\nand {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            reasons = "\n".join(bad[:NAMED]) + more
            allowed = f"; at most {self.max_bad} bad images are allowed (--max-bad)" if len(bad) > 1 else ""
            raise BadInput(f"{reasons}{allowed}")

    def subset(self, positions: Sequence[int]) -> "Images":
        """The images at these positions alone."""
        chosen = tuple(self.rows.chosen[position] for position in positions)
        ids, digest = _identified(self.rows.source, chosen)
        return replace(self, rows=replace(self.rows, chosen=chosen), ids=ids, digest=digest)


def _content_sha256(source: Source, position: int) -> bytes:
    """Of the image's bytes; an unreadable file counts as empty here and is reported when it is decoded."""
    try:
        return hashlib.sha256(source.content(position)).digest()
    except BadInput:
        return hashlib.sha256(b"").digest()


def _identified(source: Source, chosen: Sequence[int]) -> tuple[Tensor, str]:
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(lambda position: _content_sha256(source, position), chosen))
    return ids_and_digest(map(source.name, chosen), hashes)


def _source(text: str, shape: ImageShape, transform: Transform, pixels: Pixels | None) -> Source:
    path = Path(text)
    if text.endswith(".tar"):
        return shards_from_pattern(text, shape=shape, transform=transform)
    if path.is_dir():
        return folder_from_path(path, shape=shape, transform=transform)
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder, expected images")
    if path.suffix in ARRAYS:
        return array_from_path(path, shape=shape, pixels=pixels)
    raise BadInput(f"{path}: expected a folder of images, shards-{{000..099}}.tar, or {', '.join(ARRAYS)}")


def open_images(
    path: Path | str,
    *,
    image_shape: ImageShape,
    transform: Transform,
    pixels: Pixels | None = None,
    samples: int | None = None,
    seed: int = 0,
    workers: int = 0,
    max_bad: int = 0,
) -> Images:
    """The images at `path`: a folder (recursive, sorted), tar shards (`x-{000..099}.tar`, in the order written), or an
    array of preprocessed images [N,3,H,W] float32 (.npy memory-mapped; .npz and .safetensors under key `images`).

    `transform` turns a PIL image of a folder or shard into [3,H,W] float32; arrays of those are taken as they are, and
    those of uint8 as what `pixels` gives makes images of them, which is asked for once there are any; None refuses
    those. `samples` of them are drawn by `seed` and read
    in order. `workers` processes decode. Up to `max_bad` unreadable ones are skipped. Reads every image's bytes once to
    identify it. Raises BadInput where there are no images, for a file that is damaged or of another shape or dtype, and
    for too few images.
    """
    source = _source(str(path), image_shape, transform, pixels)
    if not len(source):
        raise BadInput(f"{path}: holds no images, expected at least one")
    chosen = sampled_positions(len(source), samples, seed, where=str(path), noun=Images.noun)
    ids, digest = _identified(source, chosen)
    rows = _Rows(source=source, chosen=chosen)
    return Images(rows=rows, shape=image_shape, ids=ids, digest=digest, workers=workers, max_bad=max_bad)
