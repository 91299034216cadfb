"""Images for a model: opened once, identified by content, read in order as batches [B,3,H,W] float32."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ground.errors import BadInput
from ground.pictures import Skips, is_shown, names_below, select_pictures
from ground.places import Place, Url, files_below, is_folder, is_there, place_from_text, without_column

from .image_arrays import ARRAYS, ImageShape, Pixels
from .inputs import OpenedInputs, ReadBatch
from .parquet import SUFFIX as PARQUET
from .parquet import open_parquet, parquet_from_pattern
from .saved_datasets import is_saved_dataset, saved_dataset
from .shards import shards_from_pattern
from .sources import Array, ImageSource, Transform, folder_of
from .streamed_shards import SUFFIXES as SHARD_SUFFIXES
from .streamed_shards import packing_of, streamed_shards


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

    def __getitems__(self, positions: Sequence[int]) -> list[tuple[int, Tensor | str]]:
        """Return a batch in the order of `positions`, read in the order of storage, forward where that matters."""
        rows = {position: self[position] for position in sorted(positions, key=self.chosen.__getitem__)}
        return [rows[position] for position in positions]


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

    def name_of_place(self, place: int) -> str:
        return self.source.name(place)

    def _hashes(self, places: Sequence[int]) -> Sequence[bytes]:
        return self.source.hashes(places)

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


def holds_pictures(place: Place) -> bool:
    """Return whether a place, by its name, has pictures, which need a transform; only files of arrays have none."""
    return place.suffix not in ARRAYS or (isinstance(place, Path) and place.is_dir())


def _open_folder(place: Place, column: str | None, shape: ImageShape, transform: Transform) -> ImageSource:
    """Open a directory of datasets.save_to_disk, a folder of pictures, or one of parquet files without pictures."""
    skips = Skips()
    if isinstance(place, Url):
        files = {name: int(facts.get("size") or 0) for name, facts in files_below(place).items()}
    else:
        files = dict.fromkeys(names_below(place, skips), 0)
    if is_saved_dataset(files, where=place):
        return saved_dataset(place, column=column, shape=shape, transform=transform)
    tables = [name for name in files if name.endswith(PARQUET) and is_shown(name)]
    if tables and (column is not None or not select_pictures(files, Skips())):
        places = [place / name for name in tables]
        return open_parquet(places, tables, column=column, shape=shape, transform=transform)
    return folder_of(place, files, skips, shape=shape, transform=transform)


def _open_source(where: Place, shape: ImageShape, transform: Transform, pixels: Pixels | None) -> ImageSource:
    place, column = without_column(where)
    name = place.name.lower()
    if name.endswith(SHARD_SUFFIXES):
        streamed = isinstance(place, Url) or packing_of(place) is not None
        return (streamed_shards if streamed else shards_from_pattern)(place, shape=shape, transform=transform)
    if name.endswith(PARQUET) and not is_folder(place):
        return parquet_from_pattern(place, column=column, shape=shape, transform=transform)
    if is_folder(place):
        return _open_folder(place, column, shape, transform)
    if not is_there(place):
        raise BadInput(f"{place}: no such file or folder, expected images{_lost_slash(place)}")
    if place.suffix in ARRAYS:
        return Array.from_path(place, shape=shape, pixels=pixels)
    raise BadInput(
        f"{place}: expected a folder of images, shards-{{000..099}}.tar, a parquet file, or {', '.join(ARRAYS)}"
    )


def _lost_slash(place: Place) -> str:
    is_url = isinstance(place, Path) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)) is not None
    return "; give a URL as a text, since a Path drops one of its slashes" if is_url else ""


def open_images(
    path: Place | str,
    *,
    image_shape: ImageShape,
    transform: Transform,
    pixels: Pixels | None = None,
    samples: int | None = None,
    seed: int = 0,
    workers: int = 0,
    max_bad: int = 0,
) -> Images:
    """Open images of a folder (recursive, sorted), tar shards, tables or an array [N,3,H,W], in files or behind a URL.

    Shards are x.tar or x-{000..099}.tar, also packed. Tables are x.parquet or x-{000..099}.parquet, a folder of such
    files, or a directory of datasets.save_to_disk; their column of images may follow the path (`x.parquet#NAME`).
    Arrays are .npy, .npz or .safetensors. `transform` turns a PIL image into [3,H,W] float32, `pixels()` normalises
    uint8 arrays. `samples` images are drawn by `seed`. Up to `max_bad` unreadable images are skipped. Every image's
    bytes are read once to identify it. Raises BadInput for damaged files, other shapes, and too few images; Missing
    without pyarrow for tables, and without fsspec or a protocol's package for URLs.
    """
    place = place_from_text(path)
    source = _open_source(place, image_shape, transform, pixels)
    return images_from_source(
        source, image_shape, samples=samples, seed=seed, workers=workers, max_bad=max_bad, where=place
    )


def images_from_source(
    source: ImageSource,
    shape: ImageShape,
    *,
    samples: int | None = None,
    seed: int = 0,
    workers: int = 0,
    max_bad: int = 0,
    where: object,
) -> Images:
    """Identify the images of a source, all or `samples` drawn by `seed`. Raises BadInput for too few."""
    if not len(source):
        raise BadInput(f"{where}: holds no images, expected at least one")
    images = Images(available=len(source), source=source, shape=shape, workers=workers, max_bad=max_bad)
    return images.sampled(samples, seed, where=where)
