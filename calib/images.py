"""Images for a model: opened once, identified by content, read in order as batches [B,3,H,W] float32."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ground.errors import BadInput

from .image_arrays import ARRAYS, ImageShape, Pixels
from .inputs import OpenedInputs, ReadBatch
from .shards import Shards, shards_from_pattern
from .sources import Array, Folder, Transform, folder_from_path

ImageSource = Folder | Shards | Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows(Dataset[tuple[int, Tensor | str]]):
    source: ImageSource
    chosen: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, position: int) -> tuple[int, Tensor | str]:
        try:
            return position, self.source.image(self.chosen[position])
        except BadInput as error:
            return position, str(error)


class _Loaded(NamedTuple):
    """A decode worker's result: images [B,3,H,W], their positions, errors of unreadable ones, the next position."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Images(OpenedInputs[Tensor]):
    noun: ClassVar[str] = "images"

    source: ImageSource
    shape: ImageShape
    workers: int

    @property
    def skipped(self) -> str:
        return self.source.skipped

    def example(self) -> Tensor:
        return torch.zeros(1, *self.shape)

    def _name(self, place: int) -> str:
        return self.source.name(place)

    def _hashes(self, places: Sequence[int]) -> list[bytes]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self._content_sha256, places))

    def _content_sha256(self, place: int) -> bytes:
        try:
            return hashlib.sha256(self.source.content(place)).digest()
        except BadInput:
            return hashlib.sha256(b"").digest()

    def _loaded(self, span: range, batch_size: int, *, pin: bool) -> Iterator[ReadBatch[Tensor]]:
        loader: Iterable[_Loaded] = DataLoader(
            Subset(_Rows(source=self.source, chosen=self.places), span),
            batch_size=batch_size,
            num_workers=self.workers,
            collate_fn=_loaded_from_rows,
            pin_memory=pin,
        )
        for images, positions, bad, end in loader:
            yield ReadBatch(inputs=images, ids=self.ids[positions], bad=tuple(bad), end=end)


def _open_source(text: str, shape: ImageShape, transform: Transform, pixels: Pixels | None) -> ImageSource:
    path = Path(text)
    if text.endswith(".tar"):
        return shards_from_pattern(text, shape=shape, transform=transform)
    if path.is_dir():
        return folder_from_path(path, shape=shape, transform=transform)
    if not path.exists():
        raise BadInput(f"{path}: no such file or folder, expected images")
    if path.suffix in ARRAYS:
        return Array.from_path(path, shape=shape, pixels=pixels)
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
    """Open images of a folder (recursive, sorted), of tar shards or of an array [N,3,H,W].

    Shards are given as `x-{000..099}.tar`, arrays as .npy, .npz or .safetensors. `transform` turns a PIL image into
    [3,H,W] float32, `pixels()` normalises uint8 arrays. `samples` images are drawn by `seed`. Up to `max_bad`
    unreadable images are skipped. Every image's bytes are read once to identify it. Raises BadInput for damaged files,
    other shapes, and too few images.
    """
    source = _open_source(str(path), image_shape, transform, pixels)
    if not len(source):
        raise BadInput(f"{path}: holds no images, expected at least one")
    images = Images(available=len(source), source=source, shape=image_shape, workers=workers, max_bad=max_bad)
    return images.sampled(samples, seed, where=path)
