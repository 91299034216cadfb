"""Arrays of images, preprocessed or as pixels. Imports no torch."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from ground.arrays import ArrayPlace, array_from_npy, array_from_npz, array_in_stream, arrays_from_safetensors
from ground.errors import BadInput
from ground.places import Place, Url, open_file, reading

from .draw import digest_of_contents, drawn_places
from .held import Held

ARRAYS = (".npy", ".npz", ".safetensors")
KEY = "images"
Normalise = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Pixels = Callable[[], Normalise]
ImageShape = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteArray:
    """An array behind a URL, whose rows are read one by one."""

    url: Url
    place: ArrayPlace
    held: Held[IO[bytes]] = field(default_factory=Held, compare=False, repr=False)

    @classmethod
    def from_url(cls, url: Url) -> Self:
        with reading(url), open_file(url) as file:
            size = file.seek(0, 2)
            file.seek(0)
            place = array_in_stream(file, size, KEY, where=str(url))
        if place.is_fortran:
            raise BadInput(f"{url}: is in Fortran's order, so its rows lie apart; save it by np.ascontiguousarray")
        return cls(url=url, place=place)

    @property
    def dtype(self) -> "np.dtype[Any]":
        return self.place.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, position: int) -> NDArray[Any]:
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        with reading(self.url):
            file = self.held.get(self.url, lambda: open_file(self.url))
            file.seek(self.place.start + position * size)
            content = file.read(size)
        if len(content) < size:
            raise BadInput(f"{self.url}[{position}]: the file was cut short since it was opened")
        return np.frombuffer(content, dtype=self.dtype).reshape(self.shape[1:])


def _array(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected images in {', '.join(ARRAYS)}")
    if path.suffix == ".npy":
        return array_from_npy(path, mapped=True)
    return array_from_npz(path, KEY) if path.suffix == ".npz" else arrays_from_safetensors(path, key=KEY)[KEY]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageArray:
    """Images of an array file, preprocessed or as pixels; memory-mapped where the format allows it."""

    skipped: ClassVar[str] = ""

    path: Place
    images_N3HW: "NDArray[np.float32] | NDArray[np.uint8] | RemoteArray"
    shape: ImageShape
    pixels: Normalise | None = None

    @classmethod
    def from_path(cls, path: Place, *, shape: ImageShape, pixels: Pixels | None = None) -> Self:
        """Open [N,3,H,W] float32, or uint8 with `pixels`, from .npy, or from key `images` of .npz or .safetensors.

        Raises BadInput for a missing file, another type or shape, and an empty array.
        """
        array = RemoteArray.from_url(path) if isinstance(path, Url) else _array(path)
        dtypes = (np.float32,) if pixels is None else (np.float32, np.uint8)
        if array.dtype not in dtypes or array.ndim != 4 or array.shape[1:] != shape:
            or_pixels = "" if pixels is None else ", or uint8 pixels, resized and cropped"
            expected = f"float32 [N,{','.join(map(str, shape))}], already preprocessed{or_pixels}"
            raise BadInput(f"{path}: got {array.dtype} {list(array.shape)}, expected {expected}")
        if not len(array):
            raise BadInput(f"{path}: holds no images, expected at least one")
        normalise = None if pixels is None or array.dtype != np.uint8 else pixels()
        return cls(path=path, images_N3HW=array, shape=shape, pixels=normalise)

    def __len__(self) -> int:
        return len(self.images_N3HW)

    def name(self, position: int) -> str:
        return str(position)

    def content(self, position: int) -> bytes:
        content: bytes = self.images_N3HW[position].tobytes()
        return content

    def row(self, position: int) -> NDArray[np.float32]:
        row: NDArray[Any] = np.array(self.images_N3HW[position])
        if row.dtype == np.uint8:
            assert self.pixels is not None, self.path
            row = self.pixels(row)
        if not np.isfinite(row).all():
            raise BadInput(f"{self.path}[{position}]: holds NaN or Inf, expected finite values")
        return row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnImages:
    noun: ClassVar[str] = "images"

    array: ImageArray
    places: tuple[int, ...]
    digest: str

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(self.array.name, self.places))

    def rows(self) -> Iterator[NDArray[np.float32]]:
        return map(self.array.row, self.places)


def draw_images(array: ImageArray, *, samples: int | None = None, seed: int = 0) -> DrawnImages:
    """Return `samples` of the images, drawn by `seed`, in their order; all for None. Raises BadInput for too few."""
    places = drawn_places(len(array), samples, seed, noun=DrawnImages.noun, where=array.path)
    named = ((array.name(place), hashlib.sha256(array.content(place)).digest()) for place in places)
    return DrawnImages(array=array, places=places, digest=digest_of_contents(named))
