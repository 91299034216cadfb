"""The same pictures in each form that files are stored in, for tests; a file system that counts the bytes it reads."""

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from PIL import Image
from pyarrow import parquet
from torch import Tensor

from calib.images import Images, open_images

SHAPE = (3, 4, 6)
LABELS = (1, 0, 1, 2, 0, 2, 1)


def transform(picture: Image.Image) -> Tensor:
    pixels = np.asarray(picture.resize((6, 4)), dtype=np.float32) / 255
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def opened(place: Any, **options: Any) -> Images:
    return open_images(place, image_shape=SHAPE, transform=transform, **options)


def read(images: Images, batch: int = 3) -> Tensor:
    return torch.cat(list(images.batches(batch)))


def encoded(seed: int, size: int = 96) -> bytes:
    pixels, buffer = np.random.default_rng(seed).integers(0, 255, (size, size, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = tuple(map(encoded, range(len(LABELS))))


def write_folder(root: Path) -> Path:
    (root / "photos").mkdir()
    for number, content in enumerate(PICTURES):
        (root / "photos" / f"{number}.png").write_bytes(content)
    return root / "photos"


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    mode = {"gz": "w:gz", "tgz": "w:gz", "bz2": "w:bz2", "xz": "w:xz"}.get(path.name.rpartition(".")[2], "w")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    content = buffer.getvalue()
    path.write_bytes(pa.compress(content, "zstd", asbytes=True) if path.suffix == ".zst" else content)
    return path


def shards(suffix: str) -> Callable[[Path], str]:
    """Return a function that writes two shards of pictures with labels, and returns their pattern."""

    def write(root: Path) -> str:
        for shard, numbers in enumerate((range(4), range(4, 7))):
            pictures = {f"{number}.png": PICTURES[number] for number in numbers}
            labels = {f"{number}.cls": str(LABELS[number]).encode() for number in numbers}
            write_tar(root / f"x-{shard}.{suffix}", dict(sorted((pictures | labels).items())))
        return f"{root}/x-{{0..1}}.{suffix}"

    return write


def table(contents: Sequence[bytes | None], labels: Sequence[Any], *, struct: bool) -> pa.Table:
    rows: Any = [{"bytes": each, "path": "/etc/hostname"} for each in contents] if struct else list(contents)
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if struct else pa.binary()
    return pa.table({"label": pa.array(labels, pa.int64()), "image": pa.array(rows, kind)})


def tables(*, struct: bool, folder: bool = False) -> Callable[[Path], str]:
    def write(root: Path) -> str:
        (root / "t").mkdir()
        for number, (begin, end) in enumerate(((0, 5), (5, 7))):
            rows = table(PICTURES[begin:end], LABELS[begin:end], struct=struct)
            parquet.write_table(rows, root / "t" / f"x-{number}.parquet", row_group_size=2)
        return f"{root}/t" if folder else f"{root}/t/x-{{0..1}}.parquet"

    return write


def dataset(contents: Sequence[bytes] = PICTURES, labels: Sequence[int] = LABELS) -> Any:
    import datasets

    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog", "owl"]),
        }
    )
    columns = {"image": [{"bytes": each, "path": None} for each in contents], "label": list(labels)}
    return datasets.Dataset.from_dict(columns, features=features)


def write_dataset(root: Path, contents: Sequence[bytes] = PICTURES, labels: Sequence[int] = LABELS) -> str:
    import datasets

    datasets.disable_progress_bars()
    dataset(contents, labels).save_to_disk(str(root / "saved"), num_shards=2)
    return str(root / "saved")


STORED: Mapping[str, Callable[[Path], Path | str]] = {
    "folder": write_folder,
    **{suffix: shards(suffix) for suffix in ("tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst")},
    "parquet of bytes": tables(struct=False),
    "parquet of structs": tables(struct=True),
    "folder of parquet": tables(struct=True, folder=True),
    "save_to_disk": write_dataset,
}


class CountedFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


class CountedFiles(AbstractFileSystem):  # type: ignore[misc]
    """A file system of `files` in memory that counts the bytes and the files read, with small blocks."""

    protocol = "counted"
    cachable = True
    files: dict[str, bytes] = {}  # noqa: RUF012  # one for all instances, as in fsspec's memory file system
    read = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("counted://").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path, found = self._strip_protocol(path), dict[str, Any]()
        for name, content in self.files.items():
            if name == path:
                return [{"name": name, "size": len(content), "type": "file", "ETag": str(hash(content))}]
            if name.startswith(path.rstrip("/") + "/"):
                own = path.rstrip("/") + "/" + name[len(path.rstrip("/")) + 1 :].partition("/")[0]
                is_file = own == name
                found[own] = {"name": own, "size": len(content) if is_file else 0,
                              "type": "file" if is_file else "directory", "ETag": str(hash(content))}  # fmt: skip
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if (name := self._strip_protocol(path)) not in self.files:
            raise FileNotFoundError(path)
        content = self.files[name][start:end]
        CountedFiles.read += len(content)
        return content

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> CountedFile:
        return CountedFile(self, path, mode, block_size=4096, cache_type="readahead")


def upload(root: Path, place: Path | str, url: str) -> str:
    """Copy files below a folder to an fsspec URL, and return there the place that was `place` in the folder."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with fsspec.open(f"{url}/{path.relative_to(root).as_posix()}", "wb") as file:
                file.write(path.read_bytes())
    return f"{url}/{str(place).removeprefix(str(root)).lstrip('/')}"


@contextmanager
def counted(root: Path, place: Path | str) -> Iterator[str]:
    """Yield a place's URL in a file system that counts what it reads, with all files below `root`."""
    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    files = (each for each in root.rglob("*") if each.is_file())
    CountedFiles.files = {f"/{path.relative_to(root).as_posix()}": path.read_bytes() for path in files}
    CountedFiles.read = 0
    try:
        yield f"counted://{str(place).removeprefix(str(root)).lstrip('/')}"
    finally:
        CountedFiles.files = {}


@pytest.fixture
def memory() -> Iterator[str]:
    """Yield the URL of an empty folder in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://set"
    system.store.clear()
