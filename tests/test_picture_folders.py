"""ground.pictures: which files are pictures, which folders are read, and what is said of the rest."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from corp_deploy.release.digests import Digests
from ground.errors import BadInput
from ground.pictures import Skips, pictures_below, select_pictures
from tests.command import run
from tests.stored import SHAPE, opened


def saved(path: Path, *, level: int = 200, mode: str = "RGB", form: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (level,) * 3).convert(mode).save(path, form)
    return path


@pytest.mark.parametrize(
    "name", ["a.tif", "a.TIFF", "a.gif", "a.ppm", "a.tga", "a.jp2", "a.dib", "a.pcx", "a.avif", "a.qoi", "a.ico"]
)
def test_every_image_format_is_read(tmp_path: Path, name: str) -> None:
    saved(tmp_path / name)
    (batch,) = opened(tmp_path).batches(1)
    assert torch.allclose(batch, torch.full((1, *SHAPE), 200 / 255), atol=0.01)
    assert opened(tmp_path).skipped == ""


def test_other_jpeg_suffixes_are_read(tmp_path: Path) -> None:
    for name in ("a.jfif", "b.jpe"):
        saved(tmp_path / name, form="JPEG")
    assert opened(tmp_path).available == 2


def test_sixteen_bit_grey_is_read_and_thirty_two_bit_refused(tmp_path: Path) -> None:
    levels = np.full((4, 6), 200 * 257, np.uint16)
    Image.fromarray(levels).save(tmp_path / "a.tif")
    (tmp_path / "b.pgm").write_bytes(b"P5 6 4 65535\n" + levels.astype(">u2").tobytes())
    (batch,) = opened(tmp_path).batches(2)
    assert torch.allclose(batch, torch.full((2, *SHAPE), 200 / 255), atol=0.01)
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(tmp_path / "c.tif")
    with pytest.raises(BadInput, match=r"c\.tif: not a readable image \(grey of 32 bits, whose range is not known"):
        list(opened(tmp_path).batches(3))


def test_hidden_and_system_folders_are_skipped_and_counted(tmp_path: Path) -> None:
    names = ["cat/0.jpg", "cat/.ipynb_checkpoints/0.jpg", ".thumbnails/0.jpg", "@eaDir/0.jpg", "__MACOSX/cat/._0.jpg"]
    for name in [*names, "cat/._0.jpg", "cat/.x.png"]:
        saved(tmp_path / name, form="JPEG")
    for name in ("Thumbs.db", "README", "1.heic"):
        (tmp_path / name).write_bytes(b"x")
    chosen, skips = pictures_below(tmp_path)
    assert chosen == ("cat/0.jpg",)
    assert skips.line == (
        "4 hidden or system folders (.ipynb_checkpoints, .thumbnails, @eaDir, __MACOSX); 2 hidden files "
        "(._0.jpg, .x.png); 3 files of another kind (.db, .heic, no suffix)"
    )


def test_hidden_folder_is_read_if_named_itself(tmp_path: Path) -> None:
    saved(tmp_path / ".cache/0.jpg")
    assert pictures_below(tmp_path / ".cache")[0] == ("0.jpg",)


def test_annotation_files_are_not_counted(tmp_path: Path) -> None:
    skips = Skips()
    assert select_pictures(["./0.jpg", "./0.cls", "1.seg.png", "1.json", "2.json"], skips) == ["./0.jpg", "1.seg.png"]
    assert skips.line == "1 file of another kind (.json)"


def test_symlinked_class_folders_are_read_once_and_cycles_end(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere/cat/0.jpg")
    saved(tmp_path / "photos/dog/1.jpg")
    root = tmp_path / "photos"
    for name, target in {
        "cat": tmp_path / "elsewhere/cat", "again": root / "dog", "up": tmp_path, "dog/self": root / "dog",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    chosen, skips = pictures_below(root)
    assert chosen == ("cat/0.jpg", "dog/1.jpg")
    assert skips.line == "3 links to folders that are read already (again, self, up)"
    assert opened(root).available == 2


def test_release_digests_cover_the_images_read(tmp_path: Path) -> None:
    saved(tmp_path / "elsewhere/0.jpg", level=10)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat").symlink_to(tmp_path / "elsewhere")
    digests = Digests(tmp_path / "digests.json")
    before = digests.of_path(tmp_path / "photos", pictures=True)
    saved(tmp_path / "photos/.thumbnails/0.jpg")
    assert digests.of_path(tmp_path / "photos", pictures=True) == before
    saved(tmp_path / "elsewhere/0.jpg", level=99)
    assert digests.of_path(tmp_path / "photos", pictures=True) != before


def test_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "a/0.jpg")
    saved(tmp_path / "b/1.jpg")
    scan = os.scandir

    def refusing(path: Path) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    chosen, skips = pictures_below(tmp_path)
    assert (chosen, skips.line) == (("a/0.jpg",), "1 folder that can't be read (b)")


@pytest.mark.parametrize("command", ["calibrate", "verify"])
def test_help_lists_every_form_of_images(command: str) -> None:
    text = " ".join(run(command, "--help").stdout.split())
    assert all(word in text for word in ("formats that Pillow reads", "tar shards", "float32", "uint8")), text
