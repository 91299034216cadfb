"""How many images lie at a path, by names and headers alone. Imports no torch."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open

from ground.arrays import shape_from_file
from ground.errors import BadInput

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
ARRAYS = (".npy", ".npz", ".safetensors")
KEY = "images"


def image_names(root: Path) -> tuple[tuple[str, ...], int]:
    """Every image file below `root` by relative name, sorted, hidden ones aside; and how many other files there are."""
    files = sorted(
        (Path(at) / file).relative_to(root).as_posix() for at, _, names in os.walk(root) for file in names
    )  # fmt: skip
    names = tuple(n for n in files if n.lower().endswith(SUFFIXES) and not n.rpartition("/")[2].startswith("."))
    return names, len(files) - len(names)


@contextmanager
def whole_file(path: Path) -> Iterator[None]:
    """What safetensors and numpy raise at a damaged file, each in its own way, as one BadInput."""
    try:
        yield
    except (BadInput, MemoryError):
        raise
    except Exception as error:
        raise BadInput(f"{path}: not a whole {path.suffix} file ({type(error).__name__}: {error!s:.200})") from error


@contextmanager
def images_of_safetensors(path: Path) -> Iterator[safe_open]:
    """The opened file. Raises BadInput where it has no images."""
    with safe_open(path, framework="np") as file:
        if KEY not in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            names = ", ".join(sorted(file.keys())) or "none"
            raise BadInput(f"{path}: has no key {KEY!r}, only {names[:300]}")
        yield file


def count_of_images(path: Path) -> int | None:
    """Of a folder, or of an array by its header; None for shards, which are opened to tell, and where there are none.
    Raises BadInput for a damaged array.
    """
    if path.is_dir():
        return len(image_names(path)[0]) or None
    if not path.is_file() or path.suffix not in ARRAYS:
        return None
    with whole_file(path):
        return next(iter(_shape(path)), None) or None


def _shape(path: Path) -> Sequence[int]:
    if path.suffix != ".safetensors":
        return shape_from_file(path, KEY)
    with images_of_safetensors(path) as file:
        shape: list[int] = file.get_slice(KEY).get_shape()  # type: ignore[no-untyped-call]
        return shape
