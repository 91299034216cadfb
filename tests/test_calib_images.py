"""calib.images: reading order, digests and refusals of folders, arrays and shards."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from torch import Tensor

from calib.images import Images, open_images
from ground.errors import BadInput
from ground.places import places_from_pattern
from tests.refusals import rejects
from tests.stored import SHAPE, opened, transform


def array(count: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, *SHAPE)).astype(np.float32)


def read(images: Images, batch: int = 2) -> Tensor:
    return torch.cat(list(images.batches(batch)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write five pictures of grey levels 10 to 50 in two folders and four formats, and a text file."""
    root = tmp_path / "photos"
    (root / "b").mkdir(parents=True)
    for level, name in enumerate(("a.png", "b/x.jpg", "b/y.JPEG", "b/z.webp", "c.bmp"), start=1):
        grey = Image.new("L", (8, 8), level * 10)
        (grey if name == "a.png" else grey.convert("RGB")).save(root / name)
    (root / "notes.txt").write_text("no image")
    (root / ".hidden.png").write_bytes(b"")
    return root


def test_folder_is_read_in_sorted_order(folder: Path) -> None:
    images = opened(folder)
    assert [images.name(i) for i in range(images.count)] == ["a.png", "b/x.jpg", "b/y.JPEG", "b/z.webp", "c.bmp"]
    levels = read(images).mean((1, 2, 3)) * 255
    assert torch.allclose(levels, torch.arange(10.0, 60.0, 10.0), atol=1.5)
    assert [len(batch) for batch in images.batches(2)] == [2, 2, 1]


def test_digest_depends_on_names_and_bytes_but_not_on_location(folder: Path, tmp_path: Path) -> None:
    digest = opened(folder).digest
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert opened(moved).digest == digest
    assert torch.equal(opened(moved).ids, opened(folder).ids)
    (moved / "a.png").rename(moved / "aa.png")
    assert opened(moved).digest != digest
    assert torch.equal(opened(moved).ids, opened(folder).ids)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
def test_arrays_are_returned_unchanged(tmp_path: Path, suffix: str) -> None:
    path, images_N3HW = tmp_path / f"images.{suffix}", array()
    write(path, images_N3HW)
    images = opened(path)
    assert torch.equal(read(images), torch.from_numpy(images_N3HW))
    write(tmp_path / "other.npy", images_N3HW)
    assert images.digest == opened(tmp_path / "other.npy").digest
    assert len(set(images.ids.tolist())) == images.count == 5


def write(path: Path, images: np.ndarray, key: str = "images") -> None:
    if path.suffix == ".npy":
        np.save(path, images)
    elif path.suffix == ".npz":
        np.savez(path, **{key: images})  # type: ignore[arg-type]
    else:
        save_file({key: images}, path)


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize(
    ("images", "message"),
    [
        (array().astype(np.float64), r"got float64 \[5, 3, 4, 6\], expected float32 \[N,3,4,6\]"),
        (array().astype(np.uint8), "got uint8"),
        (array().transpose(0, 2, 3, 1).copy(), r"got float32 \[5, 4, 6, 3\]"),
        (array()[0], r"got float32 \[3, 4, 6\]"),
        (array(0), "holds no images"),
    ],
)
def test_arrays_of_wrong_shape_or_dtype_are_refused(
    tmp_path: Path, suffix: str, images: np.ndarray, message: str
) -> None:
    path = tmp_path / f"images.{suffix}"
    write(path, images)
    with pytest.raises(BadInput, match=message) as error:
        opened(path)
    assert str(path) in str(error.value)


def test_dtypes_unknown_to_numpy_are_refused(tmp_path: Path) -> None:
    save_torch_file({"images": torch.zeros(2, *SHAPE).to(torch.float8_e8m0fnu)}, tmp_path / "images.safetensors")
    rejects(r"images\.safetensors: ", opened, tmp_path / "images.safetensors")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_missing_key_lists_the_available_keys(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"images.{suffix}"
    write(path, array(), key="pictures")
    rejects("no key 'images', only pictures", opened, path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_images_are_named(tmp_path: Path, bad: float) -> None:
    images = array()
    images[3, 1, 2, 2] = bad
    write(tmp_path / "images.npy", images)
    rejects(r"images.npy\[3\]: holds NaN or Inf", read, opened(tmp_path / "images.npy"))


def test_sixteen_bit_grey_equals_eight_bit_grey(tmp_path: Path) -> None:
    levels = np.arange(0, 240, 10, dtype=np.uint16).reshape(4, 6)
    for name, pixels in (("eight", levels.astype(np.uint8)), ("sixteen", levels * 257)):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "x.png")
    eight, sixteen = (read(opened(tmp_path / name)) for name in ("eight", "sixteen"))
    assert torch.equal(sixteen, eight)
    assert float(eight.max()) == np.float32(230 / 255)


def test_bad_images_are_refused_or_skipped_and_named(folder: Path) -> None:
    (folder / "b" / "x.jpg").write_bytes((folder / "b" / "x.jpg").read_bytes()[:200])
    (folder / "c.bmp").write_text("not an image")
    rejects(r"b/x\.jpg: not a readable image", read, opened(folder))
    rejects(r"x\.jpg.*\n.*c\.bmp.*at most 1 bad", read, opened(folder, max_bad=1))
    batches = list(opened(folder, max_bad=2).read(2))
    assert [len(batch.inputs) for batch in batches] == [1, 2, 0]
    assert sum(len(batch.bad) for batch in batches) == 2
    assert torch.equal(torch.cat([batch.ids for batch in batches]), opened(folder).ids[[0, 2, 3]])


def test_reading_can_start_in_the_middle(folder: Path) -> None:
    images = opened(folder)
    rest = list(images.read(2, first=2))
    assert torch.equal(torch.cat([batch.inputs for batch in rest]), read(images)[2:])
    assert [batch.end for batch in rest] == [4, 5]


def test_transform_with_unexpected_shape_is_refused(folder: Path) -> None:
    images = open_images(folder, image_shape=(3, 8, 8), transform=transform)
    rejects(r"a\.png: got torch.float32 \[3, 4, 6\], the model takes torch.float32 \[3, 8, 8", read, images)


def test_paths_without_images_are_refused(tmp_path: Path) -> None:
    rejects("no images among 0 files", opened, tmp_path)
    (tmp_path / "readme.txt").write_text("hello")
    rejects("no images among 1 files", opened, tmp_path)
    rejects("expected a folder of images, shards-", opened, tmp_path / "readme.txt")
    rejects("no such file or folder", opened, tmp_path / "nothing")


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def encoded(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (level, level, level)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Write two shards of two images each, with the labels that webdataset keeps beside them."""
    for shard in range(2):
        members = {f"{shard}{i}.png": encoded(10 * (2 * shard + i + 1)) for i in range(2)}
        write_shard(tmp_path / f"part-{shard + 8:02}.tar", members | {f"{shard}0.cls": b"7"})
    return str(tmp_path / "part-{08..09}.tar")


def test_shards_are_read_in_the_listed_order(shards: str) -> None:
    images = opened(Path(shards), workers=2)
    assert [images.name(i) for i in range(4)] == ["part-08.tar/00.png", "part-08.tar/01.png", "part-09.tar/10.png",
                                                  "part-09.tar/11.png"]  # fmt: skip
    assert torch.allclose(read(images, 3).mean((1, 2, 3)) * 255, torch.tensor([10.0, 20.0, 30.0, 40.0]), atol=0.1)


def test_shard_pattern_keeps_the_width_of_its_first_number() -> None:
    assert [str(path) for path in places_from_pattern("a{1..2}-{09..11}.tar")] == [
        "a1-09.tar", "a1-10.tar", "a1-11.tar", "a2-09.tar", "a2-10.tar", "a2-11.tar"
    ]  # fmt: skip
    rejects("runs backwards", places_from_pattern, "a{3..2}.tar")


def test_bad_shards_are_refused(tmp_path: Path, shards: str) -> None:
    rejects(r"part-10\.tar: no such shard", opened, Path(shards.replace("{08..09}", "{08..10}")))
    whole = (tmp_path / "part-09.tar").read_bytes()
    for content in (whole[:700], b"no tar", b""):
        (tmp_path / "part-09.tar").write_bytes(content)
        rejects(r"part-09\.tar: not a valid uncompressed tar file", opened, Path(shards))
    write_shard(tmp_path / "labels.tar", {"0.cls": b"7"})
    rejects(r"labels\.tar: no images in it", opened, tmp_path / "labels.tar")
    write_shard(tmp_path / "broken.tar", {"0.png": encoded(9)[:30]})
    rejects(r"broken\.tar/0\.png: not a readable image", read, opened(tmp_path / "broken.tar"))


def test_impossible_sample_numbers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "images.npy", array())
    rejects("batch size: got 0", read, opened(tmp_path / "images.npy"), batch=0)
