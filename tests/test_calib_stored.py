"""Images as they are stored: packed shards, parquet, data sets on disk, and URLs of all forms give the same images."""

import hashlib
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import save_file

from calib.image_arrays import ImageArray, draw_images
from calib.images import Images, images_from_source, open_images
from calib.saved_datasets import dataset_source
from ground.errors import BadInput, Missing
from ground.places import Url, digest_of_url, place_below, place_from_text
from tests.refusals import rejects
from tests.stored import (
    LABELS,
    PICTURES,
    SHAPE,
    STORED,
    CountedFiles,
    counted,
    dataset,
    encoded,
    memory,
    opened,
    read,
    table,
    transform,
    upload,
    write_dataset,
    write_folder,
    write_tar,
)

__all__ = ["memory"]
IDS = [int.from_bytes(hashlib.sha256(each).digest()[:8], "little", signed=True) for each in PICTURES]


@pytest.mark.parametrize("form", STORED)
def test_every_form_gives_the_same_images_from_files_and_from_memory(form: str, tmp_path: Path, memory: str) -> None:
    expected = read(opened(write_folder(tmp_path))).clone()
    shutil.rmtree(tmp_path / "photos")
    place = STORED[form](tmp_path)
    images, remote = opened(place), opened(upload(tmp_path, place, memory))
    assert images.ids.tolist() == IDS
    assert torch.equal(read(images), expected)
    assert torch.equal(read(remote), expected)
    assert remote.digest == images.digest
    assert [remote.name(each) for each in range(7)] == [images.name(each) for each in range(7)]
    drawn = opened(place, samples=3, seed=1)
    assert torch.equal(drawn.ids, opened(upload(tmp_path, place, memory), samples=3, seed=1).ids)
    assert torch.equal(drawn.ids, images.ids[list(drawn.places)])


@pytest.mark.parametrize("form", STORED)
def test_every_form_is_read_in_any_order_and_by_copies_of_its_source(form: str, tmp_path: Path, memory: str) -> None:
    place = STORED[form](tmp_path)
    for images in (opened(place), opened(upload(tmp_path, place, memory))):
        whole = read(images, 7)
        mixed = images.subset([5, 0, 6, 2, 2, 1])
        assert torch.equal(read(mixed, 2), whole[[5, 0, 6, 2, 2, 1]])
        again = pickle.loads(pickle.dumps(images.source))
        assert all(torch.equal(again.image(each), whole[each]) for each in (6, 3, 0))


@pytest.mark.parametrize("form", ["tar.gz", "parquet of structs", "save_to_disk"])
def test_worker_processes_read_what_one_process_reads(form: str, tmp_path: Path, memory: str) -> None:
    place = STORED[form](tmp_path)
    images = opened(upload(tmp_path, place, memory), workers=2)
    assert torch.equal(read(images, 2), read(opened(place), 2))


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_remote_arrays_equal_local_ones(suffix: str, dtype: Any, tmp_path: Path, memory: str) -> None:
    array = np.random.default_rng(0).integers(0, 200, (5, *SHAPE)).astype(dtype)
    path = tmp_path / f"x.{suffix}"
    write_array(path, array)
    url, as_float = upload(tmp_path, path, memory), lambda pixels: pixels.astype(np.float32)
    local, remote = opened(path, pixels=lambda: as_float), opened(url, pixels=lambda: as_float)
    assert remote.digest == local.digest
    assert torch.equal(remote.ids, local.ids)
    assert torch.equal(read(remote), torch.from_numpy(array.astype(np.float32)))
    rows = draw_images(ImageArray.from_path(Url(url), shape=SHAPE, pixels=lambda: as_float), samples=2).rows()
    assert len(list(rows)) == 2


def write_array(path: Path, array: np.ndarray) -> None:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, other=np.zeros(3), images=array)
    else:
        save_file({"other": np.zeros(3, np.float32), "images": array}, path)


def test_remote_arrays_whose_rows_have_no_place_are_refused(tmp_path: Path, memory: str) -> None:
    array = np.zeros((5, *SHAPE), np.float32)
    np.savez_compressed(tmp_path / "c.npz", images=array)
    np.save(tmp_path / "f.npy", np.asfortranarray(array))
    np.savez(tmp_path / "k.npz", photos=array)
    save_file({"photos": array}, tmp_path / "k.safetensors")
    whole = json.dumps({"images": {"dtype": "F32", "shape": [5, *SHAPE], "data_offsets": [0, 9]}}).encode()
    (tmp_path / "d.safetensors").write_bytes(len(whole).to_bytes(8, "little") + whole + bytes(9))
    np.save(tmp_path / "t.npy", array)
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-4])
    for name, message in {
        "c.npz": "is compressed.*save it as .npy",
        "f.npy": "Fortran's order",
        "k.npz": "no key 'images', only photos",
        "k.safetensors": "no key 'images', only photos",
        "d.safetensors": "not a valid .safetensors file .*has 9 bytes",
        "t.npy": "and 1436 are there",
    }.items():
        rejects(message, opened, upload(tmp_path, tmp_path / name, memory))


BAD: tuple[bytes | None, ...] = (PICTURES[0], None, b"no picture", PICTURES[3], encoded(4)[:40])


def bad_tables(root: Path) -> Iterator[Path | str]:
    import datasets

    for struct in (False, True):
        path = root / f"{struct}.parquet"
        parquet.write_table(table(BAD, [0, 1, 2, None, 1], struct=struct), path, row_group_size=2)
        yield path
    datasets.disable_progress_bars()
    dataset().save_to_disk(str(root / "saved"))
    rows = table(BAD, [0, 1, 2, None, 1], struct=True)  # datasets would put the content of the path in place of a null
    with pa.ipc.new_stream(str(root / "saved" / "data-00000-of-00001.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    yield root / "saved"


def test_bad_rows_are_counted_and_named_and_paths_in_rows_are_not_followed(tmp_path: Path, memory: str) -> None:
    for local in bad_tables(tmp_path):
        for place in (local, upload(tmp_path, local, memory)):
            images = opened(place, max_bad=3)
            assert read(images, 2).shape == (2, *SHAPE)
            bad = [line for batch in images.read(2) for line in batch.bad]
            rows = [line.partition(" row ")[2].partition(":")[0] for line in bad]
            assert rows == ["1", "2", "4"]
            assert "holds no bytes (null)" in bad[0]
            assert "not a readable image" in bad[1]
            with pytest.raises(BadInput, match=r"row 1: .*\n.* row 2: .*\n.*row 4: .*at most 2 bad images"):
                read(opened(place, max_bad=2), 5)
            assert images.ids[1].item() == images.subset([1]).ids.item()
            rejects("column label lacks 1 labels", images.source.labels, "label")


def test_columns_are_found_or_named_behind_the_path(tmp_path: Path, memory: str) -> None:
    left, right = pa.array(PICTURES[:3]), pa.array(PICTURES[3:6])
    parquet.write_table(pa.table({"left": left, "right": right, "n": [1, 2, 3]}), tmp_path / "two.parquet")
    rejects(r"columns left, right may hold.*two\.parquet#left'", opened, tmp_path / "two.parquet")
    assert opened(f"{tmp_path}/two.parquet#right").ids.tolist() == IDS[3:6]
    assert opened(upload(tmp_path, f"{tmp_path}/two.parquet#left", memory)).ids.tolist() == IDS[:3]
    rejects(
        r"no column 'n' with bytes of images; its columns are left \(binary\), right",
        opened,
        f"{tmp_path}/two.parquet#n",
    )
    parquet.write_table(pa.table({"mask": left, "image": right}), tmp_path / "named.parquet")
    assert opened(tmp_path / "named.parquet").ids.tolist() == IDS[3:6]
    parquet.write_table(pa.table({"n": [1], "t": ["x"]}), tmp_path / "none.parquet")
    rejects(r"no column of images.*got n \(int64\), t \(string\)", opened, tmp_path / "none.parquet")


def test_damaged_tables_are_refused(tmp_path: Path, memory: str) -> None:
    place = Path(str(STORED["folder of parquet"](tmp_path)))
    whole = (place / "x-1.parquet").read_bytes()
    for content in (whole[:100], b"", b"no table", whole[:20] + bytes(8)):
        (place / "x-1.parquet").write_bytes(content)
        rejects(r"x-1\.parquet: ", opened, place)
        rejects(r"x-1\.parquet: ", opened, upload(tmp_path, place, memory))
    (place / "x-1.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    rejects("a Git LFS pointer", opened, place)
    (place / "x-1.parquet").unlink()
    rejects(r"x-1\.parquet: no such file", opened, f"{place}/x-{{0..1}}.parquet")
    rejects("no such file or folder", opened, f"{memory}/nothing.parquet")


def test_damaged_pages_are_bad_rows(tmp_path: Path) -> None:
    rows = table(PICTURES, LABELS, struct=False)
    parquet.write_table(rows, tmp_path / "x.parquet", compression="none", row_group_size=4, use_dictionary=False)
    whole = bytearray((tmp_path / "x.parquet").read_bytes())
    footer = parquet.read_metadata(tmp_path / "x.parquet").row_group(1).column(1)
    at = footer.data_page_offset
    whole[at : at + 16] = bytes(16)
    (tmp_path / "x.parquet").write_bytes(whole)
    images = opened(tmp_path / "x.parquet", max_bad=3)
    assert images.ids[:4].tolist() == IDS[:4]
    batches = list(images.read(7))
    assert len(batches[0].inputs) == 4
    assert len(batches[0].bad) == 3


def test_directories_of_save_to_disk_are_checked(tmp_path: Path) -> None:
    import datasets

    place = Path(write_dataset(tmp_path))
    datasets.DatasetDict({"train": dataset(), "test": dataset()}).save_to_disk(str(tmp_path / "both"))
    rejects(r"holds the splits.*both/train, .*both/test", opened, tmp_path / "both")
    assert opened(tmp_path / "both" / "test").ids.tolist() == IDS
    state = (place / "state.json").read_text()
    (place / "state.json").write_text(state.replace("data-00001", "../data-00001"))
    rejects("leads out of its directory", opened, place)
    (place / "state.json").write_text("{")
    rejects(r"state\.json", opened, place)
    (place / "state.json").write_text(state)
    arrow_file = place / "data-00001-of-00002.arrow"
    whole = arrow_file.read_bytes()
    for content in (b"", whole[:90], b"nothing of arrow" * 9):
        arrow_file.write_bytes(content)
        rejects(r"data-00001-of-00002\.arrow: ", opened, place)


def test_offsets_in_arrow_files_are_not_trusted(tmp_path: Path, memory: str) -> None:
    place = Path(write_dataset(tmp_path))
    path = place / "data-00000-of-00002.arrow"
    whole = path.read_bytes()
    with pa.OSFile(str(path)) as file:
        rows = pa.ipc.open_stream(file).read_next_batch().column(0).flatten()[0]
    offsets = np.frombuffer(rows.buffers()[1], np.int32, count=len(rows) + 1).tobytes()
    assert whole.count(offsets) == 1
    wrong = np.frombuffer(offsets, np.int32).copy()
    wrong[2] = 2**30
    path.write_bytes(whole.replace(offsets, wrong.tobytes()))
    with pytest.raises(BadInput, match="not a valid file of datasets"):
        read(opened(place))
    rejects("not a valid file of datasets.save_to_disk", opened, upload(tmp_path, place, memory))


def test_packed_shards_that_are_cut_short_or_hostile_are_refused(tmp_path: Path) -> None:
    for suffix in ("tar.gz", "tar.bz2", "tar.xz", "tar.zst"):
        place = str(STORED[suffix](tmp_path))
        whole = (tmp_path / f"x-1.{suffix}").read_bytes()
        for content in (whole[: len(whole) // 2], b"no tar", b""):
            (tmp_path / f"x-1.{suffix}").write_bytes(content)
            rejects(rf"x-1\.{suffix}: not a valid tar packed by", opened, place)
    write_tar(tmp_path / "out.tar.gz", {"../a.png": PICTURES[0]})
    rejects("has a path that leaves the archive", opened, tmp_path / "out.tar.gz")
    write_tar(tmp_path / "labels.tgz", {"0.cls": b"1"})
    rejects("no images in it", opened, tmp_path / "labels.tgz")
    write_tar(tmp_path / "bad.tgz", {"0.png": PICTURES[0][:30], "1.png": PICTURES[1]})
    images = opened(tmp_path / "bad.tgz", max_bad=1)
    (bad,) = (line for batch in images.read(2) for line in batch.bad)
    assert bad.startswith(f"{tmp_path}/bad.tgz/0.png: not a readable image")
    rejects("no such file or folder", opened, tmp_path / "none.tar.gz")


@pytest.mark.parametrize("form", STORED)
def test_remote_sets_are_read_once_to_be_identified_and_once_a_pass(form: str, tmp_path: Path) -> None:
    place = STORED[form](tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    with counted(tmp_path, place) as url:
        images = opened(url)
        assert images.ids.tolist() == IDS
        identified, CountedFiles.read = CountedFiles.read, 0
        assert images.subset([0, 3]).ids.tolist() == [IDS[0], IDS[3]]
        assert CountedFiles.read == 0
        assert torch.equal(read(images, 2), read(opened(place), 2))
    footers = 2 * 2**16 if "parquet" in form else 0  # Arrow reads the last 64 KiB of each file for its footer
    assert identified <= 1.2 * size + footers, "headers, and blocks read ahead"
    assert CountedFiles.read <= 1.2 * size


@pytest.mark.parametrize("form", ["tar", "tar.gz", "parquet", "npy"])
def test_single_images_of_large_remote_files_cost_no_whole_file(form: str, tmp_path: Path) -> None:
    contents = [np.random.default_rng(each).bytes(30_000) for each in range(60)]
    path = tmp_path / f"x.{form}"
    if form == "npy":
        np.save(path, np.random.default_rng(0).random((60, 3, 50, 50), np.float32))
    elif form == "parquet":
        parquet.write_table(pa.table({"image": contents}), path, row_group_size=6, compression="none")
    else:
        write_tar(path, {f"{number:02}.png": content for number, content in enumerate(contents)})
    size = path.stat().st_size
    with counted(tmp_path, path) as url:
        images = open_images(url, image_shape=(3, 50, 50), transform=transform)
        assert CountedFiles.read < 1.2 * size
        CountedFiles.read = 0
        for position in range(60):
            images.source.content(position)
        assert CountedFiles.read < 1.4 * size
        CountedFiles.read = 0
        if form != "tar.gz":  # which can only be read from its beginning
            images.source.content(3)
            assert CountedFiles.read < 0.15 * size


def test_row_groups_are_streamed_not_held(tmp_path: Path, memory: str) -> None:
    contents, path = [np.random.default_rng(each).bytes(2**17) for each in range(128)], tmp_path / "x.parquet"
    whole = pa.table({"image": contents})
    parquet.write_table(whole, path, compression="none", use_dictionary=False, write_batch_size=2)
    assert parquet.read_metadata(path).num_row_groups == 1
    for place in (path, upload(tmp_path, path, memory)):
        before = pa.total_allocated_bytes()
        images = opened(place)
        most = 0
        for position in range(images.count):
            images.source.content(position)
            most = max(most, pa.total_allocated_bytes() - before)
        assert most < 2**17 * 40, "about two batches of 16 rows"


@pytest.mark.parametrize("form", [form for form in STORED if form != "folder"])
def test_labels_are_a_column_of_the_source(form: str, tmp_path: Path, memory: str) -> None:
    place, column = STORED[form](tmp_path), "cls" if form.startswith("t") else "label"
    for images in (opened(place), opened(upload(tmp_path, place, memory))):
        assert images.source.label_columns == (column,)
        assert images.source.labels(column).tolist() == list(LABELS)


def test_members_without_a_label_are_named(tmp_path: Path) -> None:
    for suffix in ("tar", "tar.gz"):
        write_tar(
            tmp_path / f"x.{suffix}", {"a.png": PICTURES[0], "a.cls": b"1", "b.png": PICTURES[1], "b.cls": b"cat"}
        )
        rejects(r"b\.png: its \.cls is b'cat', expected a class", opened(tmp_path / f"x.{suffix}").source.labels, "cls")
        write_tar(tmp_path / f"x.{suffix}", {"a.png": PICTURES[0], "a.cls": b"1", "b.png": PICTURES[1]})
        rejects(r"b\.png: no member of the same name", opened(tmp_path / f"x.{suffix}").source.labels, "cls")


def in_memory(data: Any) -> Images:
    source = dataset_source(data, shape=SHAPE, transform=transform)
    return images_from_source(source, SHAPE, where="data set")


def test_opened_data_sets_equal_their_directories(tmp_path: Path) -> None:
    import datasets

    images, directory = in_memory(dataset()), opened(write_dataset(tmp_path))
    assert torch.equal(images.ids, directory.ids)
    assert torch.equal(read(images), read(directory))
    assert images.source.label_columns == ("label",)
    assert images.source.labels("label").tolist() == list(LABELS)
    mixed = in_memory(dataset().select([4, 2, 2, 6]))
    assert mixed.ids.tolist() == [IDS[each] for each in (4, 2, 2, 6)]
    assert mixed.source.labels("label").tolist() == [LABELS[each] for each in (4, 2, 2, 6)]
    assert torch.equal(pickle.loads(pickle.dumps(mixed.source)).image(1), read(directory)[2])
    paths = sorted(str(each) for each in write_folder(tmp_path).iterdir())
    named = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    assert in_memory(named).ids.tolist() == IDS
    rejects("holds the splits of a data set; give one of them: train", in_memory, {"train": dataset()})


def test_absent_packages_are_named(tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = STORED["parquet of bytes"](tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(Missing, match=r"pyarrow is not installed; pip install 'corp-deploy\[data\]'"):
            opened(place)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fsspec.core", None)
        with pytest.raises(Missing, match=r"URLs need fsspec; pip install 'corp-deploy\[data\]'"):
            opened(f"{memory}/x.npy")
    with pytest.raises(Missing, match="s3fs"):
        opened("s3://bucket/photos")
    rejects("gopher://x: can't be read .*[Pp]rotocol", opened, "gopher://x")
    rejects("give a URL as a text, since a Path drops one of its slashes", opened, Path("s3://bucket/x.npy"))


def test_places_are_paths_or_urls(tmp_path: Path) -> None:
    assert place_from_text("a/b.npy") == Path("a/b.npy")
    assert place_from_text("C:/x") == Path("C:/x")
    url = place_below(tmp_path, "s3://bucket/a/b.npy")
    assert (url, url.name, url.suffix, url.resolve()) == ("s3://bucket/a/b.npy", "b.npy", ".npy", url)
    assert isinstance(url, Url)
    assert url / "c" == "s3://bucket/a/b.npy/c"
    assert place_below(tmp_path, "x") == tmp_path / "x"


def test_digest_of_a_url_changes_with_its_files(tmp_path: Path, memory: str) -> None:
    place = STORED["parquet of bytes"](tmp_path)
    with counted(tmp_path, place) as url:
        first = digest_of_url(Url(url))
        assert digest_of_url(Url(url)) == first
        assert CountedFiles.read == 0
        CountedFiles.files["/t/x-0.parquet"] += b"x"
        assert digest_of_url(Url(url)) != first
    upload(tmp_path, place, memory)
    whole = digest_of_url(Url(f"{memory}/t"))
    upload(tmp_path, place, memory)
    assert digest_of_url(Url(f"{memory}/t")) != whole, "times tell files apart that have no checksum"
    rejects("no such file or folder", digest_of_url, Url(f"{memory}/none"))
