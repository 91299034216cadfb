"""Sources of images: the name and bytes of each image, and its decoding to a tensor [3,H,W] float32."""

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in
from ground.files import regular_file
from ground.pictures import Skips, formats_for, select_pictures
from ground.places import Place, Url, read_at_once

from .image_arrays import ImageArray, ImageShape

EXPECTED = "expected pictures, such as .jpg, .png, .webp, .tif or .gif"
MOST_BYTES = 2**28
Transform = Callable[[Image.Image], Tensor]


def refuse_large(size_bytes: int, name: str) -> None:
    if size_bytes > MOST_BYTES:
        raise BadInput(f"{name}: {size_bytes} bytes, larger than any picture; {MOST_BYTES} at most are read")


def image_from_bytes(content: bytes, name: str, shape: ImageShape, transform: Transform) -> Tensor:
    """Decode the first frame to RGB and transform it to [3,H,W].

    Raises BadInput for pictures that can't be read or exceed Pillow's safe size, and for NaN and Inf.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about metadata and transparency
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = _with_eight_bits(Image.open(io.BytesIO(content), formats=formats_for(name))).convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        why = "the content is no picture that Pillow reads" if content else "the file is empty"
        raise BadInput(f"{name}: not a readable image ({why}); remove it or allow bad images") from None
    except Exception as error:  # each decoder raises its own errors at damaged pictures
        raise BadInput(f"{name}: not a readable image ({error!s:.200}); remove it or allow bad images") from error
    image = transform(picture)
    if image.dtype != torch.float32 or tuple(image.shape) != shape:
        raise BadInput(f"{name}: got {image.dtype} {list(image.shape)}, the model takes torch.float32 {list(shape)}")
    if not torch.isfinite(image).all():
        raise BadInput(f"{name}: holds NaN or Inf, expected finite values")
    return image


def _with_eight_bits(opened: Image.Image) -> Image.Image:
    """Convert a picture to a mode that Pillow turns into RGB without clipping.

    Raises ValueError for 32-bit numbers, whose range is unknown.
    """
    if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format == "PPM"):
        return Image.fromarray(
            (np.asarray(opened) >> 8).astype(np.uint8)
        )  # for colours Pillow takes the high byte, too
    if opened.mode in ("I", "F"):
        raise ValueError("grey of 32 bits, whose range is not known; save it with 8 or 16 bits")
    return opened.convert(opened.mode.upper()) if opened.mode in ("La", "RGBa") else opened


class ImageSource(Protocol):
    """Images by position; `content` and `image` raise BadInput for one that can't be read."""

    @property
    def skipped(self) -> str: ...

    @property
    def label_columns(self) -> Sequence[str]:
        """The names of columns of class indices that are stored beside the images."""

    def __len__(self) -> int: ...

    def name(self, position: int) -> str: ...

    def content(self, position: int) -> bytes: ...

    def image(self, position: int) -> Tensor: ...

    def hashes(self, positions: Sequence[int]) -> Sequence[bytes]: ...

    def labels(self, column: str) -> NDArray[np.int64]:
        """Return a column of `label_columns`, one class index an image. Raises BadInput for a missing one."""


def content_sha256(source: ImageSource, position: int) -> bytes:
    """Return the SHA-256 of an image's bytes, that of no bytes for one that can't be read."""
    try:
        return hashlib.sha256(source.content(position)).digest()
    except BadInput:
        return hashlib.sha256(b"").digest()


class Unlabelled:
    """The methods of a source that has no columns, and whose images can be read by several threads."""

    __slots__ = ()

    @property
    def label_columns(self) -> Sequence[str]:
        return ()

    def labels(self, column: str) -> NDArray[np.int64]:
        raise NotImplementedError

    def hashes(self: ImageSource, positions: Sequence[int]) -> Sequence[bytes]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda position: content_sha256(self, position), positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures(Unlabelled):
    """Encoded pictures by position; `image` raises BadInput for a picture that can't be read."""

    shape: ImageShape
    transform: Transform
    skipped: str = ""

    def __len__(self) -> int:
        raise NotImplementedError

    def name(self, position: int) -> str:
        raise NotImplementedError

    def where(self, position: int) -> str:
        raise NotImplementedError

    def content(self, position: int) -> bytes:
        raise NotImplementedError

    def image(self, position: int) -> Tensor:
        content, where = self.content(position), self.where(position)
        refuse_stand_in(content, where)
        return image_from_bytes(content, where, self.shape, self.transform)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Below(Pictures):
    """Base of pictures below a place, by their names there."""

    root: Place
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, position: int) -> str:
        return self.names[position]

    def where(self, position: int) -> str:
        return str(self.root / self.names[position])


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder(_Below):
    root: Path

    def content(self, position: int) -> bytes:
        path = self.root / self.names[position]
        try:
            refuse_large(regular_file(path).stat().st_size, str(path))
            return path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: can't be read ({error.strerror})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFolder(_Below):
    """The pictures below a URL, each of which is one request."""

    root: Url
    sizes: tuple[int, ...]

    def content(self, position: int) -> bytes:
        where = self.root / self.names[position]
        refuse_large(self.sizes[position], str(where))
        return read_at_once(where)


def folder_of(
    root: Place, files: Mapping[str, int], skips: Skips, *, shape: ImageShape, transform: Transform
) -> Folder | RemoteFolder:
    """Return the pictures among the files, given with their sizes, below a folder or URL. Raises BadInput for none."""
    names = tuple(select_pictures(files, skips))
    if not names:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{root}: no images among {skips.files} files{left_out}, {EXPECTED}")
    if isinstance(root, Path):
        return Folder(root=root, names=names, shape=shape, transform=transform, skipped=skips.line)
    sizes = tuple(map(files.__getitem__, names))
    return RemoteFolder(root=root, names=names, sizes=sizes, shape=shape, transform=transform, skipped=skips.line)


class Array(ImageArray, Unlabelled):
    __slots__ = ()

    def image(self, position: int) -> Tensor:
        return torch.from_numpy(self.row(position))

    def hashes(self, positions: Sequence[int]) -> Sequence[bytes]:
        if isinstance(self.path, Url):  # one open file is read forward
            return [content_sha256(self, position) for position in positions]
        return Unlabelled.hashes(self, positions)
