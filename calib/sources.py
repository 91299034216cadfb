"""Sources of images: the name and bytes of each image, and its decoding to a tensor [3,H,W] float32."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ground.errors import BadInput
from ground.file_kinds import refuse_stand_in
from ground.files import regular_file
from ground.pictures import formats_for, pictures_below

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Picture files by position; `image` raises BadInput for a picture that can't be read."""

    shape: ImageShape
    transform: Transform
    skipped: str = ""

    def where(self, position: int) -> str:
        raise NotImplementedError

    def content(self, position: int) -> bytes:
        raise NotImplementedError

    def image(self, position: int) -> Tensor:
        content, where = self.content(position), self.where(position)
        refuse_stand_in(content, where)
        return image_from_bytes(content, where, self.shape, self.transform)


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder(Pictures):
    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def name(self, position: int) -> str:
        return self.names[position]

    def content(self, position: int) -> bytes:
        path = self.root / self.names[position]
        try:
            refuse_large(regular_file(path).stat().st_size, str(path))
            return path.read_bytes()
        except OSError as error:
            raise BadInput(f"{path}: can't be read ({error.strerror})") from error

    def where(self, position: int) -> str:
        return str(self.root / self.names[position])


def folder_from_path(root: Path, *, shape: ImageShape, transform: Transform) -> Folder:
    names, skips = pictures_below(root)
    if not names:
        left_out = f" ({skips.line})" if skips.line else ""
        raise BadInput(f"{root}: no images among {skips.files} files{left_out}, {EXPECTED}")
    return Folder(root=root, names=names, shape=shape, transform=transform, skipped=skips.line)


class Array(ImageArray):
    __slots__ = ()

    def image(self, position: int) -> Tensor:
        return torch.from_numpy(self.row(position))
