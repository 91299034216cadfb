"""Files made to harm: refused in one message before any memory is taken for what they promise."""

import io
import json
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save as safetensors_bytes

from calib import store
from calib.groups import group_ids
from calib.images import open_images
from calib.shards import members_of_tar
from corp_deploy.release.check import check_release, replay
from corp_deploy.store.checkpoint import save
from corp_deploy.store.weights import read_weights
from ground.arrays import array_from_file, array_from_npy, array_from_npz, arrays_from_npz
from ground.errors import BadInput
from ground.files import path_inside, write_json
from ground.places import places_from_pattern
from ground.transaction import roll_back_interrupted
from tests import tiny
from tests.command import invoked
from tests.refusals import rejects

SHAPE = (3, 4, 6)
MOST_PEAK_BYTES, MOST_SECONDS = 2**26, 5.0


@contextmanager
def cheap() -> Iterator[None]:
    """Whatever happens inside takes neither memory nor time."""
    before = time.perf_counter()
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_PEAK_BYTES, f"{peak / 2**20:.0f} MiB"
    assert time.perf_counter() - before < MOST_SECONDS


def refused(read: Callable[[], object], said: str) -> None:
    with cheap(), pytest.raises(BadInput, match=said) as error:
        read()
    assert len(str(error.value)) < 1500


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "dense"
    save(tiny.checkpoint(), folder)
    return folder


# .npy and .npz


def npy(header: str, content: bytes = b"", *, version: int = 1, length: int | None = None) -> bytes:
    text = header.encode()
    prefix = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + prefix + text + content


def described(shape: str, descr: str = "'<f4'") -> bytes:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", bytes(64))


NPY = {
    "a negative size": (described("(-1, 3, 4, 6)"), "which is not a valid shape"),
    "10^12 images": (described(f"({10**12}, 3, 4, 6)"), "288000000000000 bytes, and 64 are there"),
    "a size beyond 64 bits": (described(f"({2**70}, 3, 4, 6)"), "which is not a valid shape"),
    "nothing, but of a size beyond 64 bits": (described(f"(0, {2**70})"), "which is not a valid shape"),
    "a product beyond 64 bits": (described(f"({2**40}, {2**40})"), "not a valid .npy file"),
    "objects": (described("(2,)", "'|O'"), "pickled objects, which are never loaded"),
    "objects inside": (described("(2,)", "[('a', '|O')]"), "pickled objects, which are never loaded"),
    "fields": (described("(2,)", "[('a', '<f4')]"), "expected plain numbers"),
    "untyped bytes": (described("(2,)", "'|V8'"), "expected plain numbers"),
    "a header of 4 GB": (npy("{", version=2, length=2**32 - 1), "a header of 4294967295 bytes"),
    "a header nested deep": (npy("(" * 4000), "not a valid .npy file"),
    "a header of unary signs": (npy("-" * 4000 + "1"), "not a valid .npy file"),
    "a header that is a call": (described("__import__('os').getpid()"), "not a valid .npy file"),
    "version 3": (npy("{}", version=3), "expected 1.0 or 2.0"),
    "a digit too many": (described(f"({'9' * 5000},)"), "not a valid .npy file"),
}


@pytest.mark.parametrize("kind", NPY)
def test_array_size_must_match_its_file(tmp_path: Path, kind: str) -> None:
    content, said = NPY[kind]
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    for read in (array_from_npy, lambda each: array_from_npy(each, mapped=True)):
        refused(lambda read=read: read(path), said)  # type: ignore[misc]
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    refused(lambda: array_from_npz(tmp_path / "x.npz", "x"), said)


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3).T, np.array(["a", "bc"]), np.zeros((0, 3), np.uint8)])
def test_arrays_round_trip(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", x=array)
    np.savez_compressed(tmp_path / "y.npz", labels=array)
    for read in (
        array_from_npy(tmp_path / "x.npy"),
        array_from_npy(tmp_path / "x.npy", mapped=True),
        arrays_from_npz(tmp_path / "x.npz")["x"],
        array_from_file(tmp_path / "y.npz", "labels"),
        array_from_file(tmp_path / "x.npy", "labels"),
    ):
        np.testing.assert_array_equal(read, array)
        assert read.dtype == array.dtype


def packed(
    path: Path, *, name: str = "images.npy", says: int | None = None, method: int = zipfile.ZIP_DEFLATED
) -> Path:
    """An archive of 4 MiB of zeros whose table of contents may say another size."""
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, described(f"({2**20},)")[:-64] + bytes(2**22))
    content = path.read_bytes()
    if says is not None:
        at = content.index(b"PK\x01\x02") + 24
        path.write_bytes(content[:at] + struct.pack("<I", says) + content[at + 4 :])
    return path


def test_archive_inflation_is_bounded(tmp_path: Path) -> None:
    bomb = packed(tmp_path / "bomb.npz", says=4_000_000_000)
    assert bomb.stat().st_size < 10_000
    for read in (lambda: array_from_npz(bomb, "images"), lambda: arrays_from_npz(bomb)):
        refused(read, "would inflate to 4000000000 bytes")
    images = bomb.rename(tmp_path / "images.npz")
    refused(lambda: open_images(images, image_shape=SHAPE, transform=_never), "would inflate to")
    liar = packed(tmp_path / "liar.npz", says=1000)
    refused(lambda: array_from_npz(liar, "images"), "not a valid .npz file .*CRC")
    assert array_from_npz(packed(tmp_path / "good.npz"), "images").shape == (2**20,)


@pytest.mark.parametrize("name", ["../images.npy", "/tmp/images.npy", "a/../../images.npy"])
def test_archive_names_cannot_escape_and_other_compressions_are_refused(tmp_path: Path, name: str) -> None:
    refused(lambda: arrays_from_npz(packed(tmp_path / "x.npz", name=name)), "leaves the archive")
    refused(
        lambda: arrays_from_npz(packed(tmp_path / "x.npz", method=zipfile.ZIP_BZIP2)),
        "packed by neither store nor deflate",
    )


def _never(_: Image.Image) -> torch.Tensor:
    raise AssertionError("nothing is decoded")


# Pictures


def png(width: int, height: int) -> bytes:
    """A header that says so, and hardly any pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99)))]
    chunks.append((b"IEND", b""))
    body = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def picture(form: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, form)
    return content.getvalue()


PICTURES = {
    "20,000 x 20,000 pixels": (png(20_000, 20_000), "exceeds limit of"),
    "12,000 x 12,000 pixels, of which Pillow only warns": (png(12_000, 12_000), "exceeds limit of"),
    "an EPS, which another program would be run for": (picture("EPS"), "no picture that Pillow reads"),
    "a film": (b"\0\0\1\xb3" + bytes(60), "no picture that Pillow reads"),
    "HDF5, which has no reader": (b"\x89HDF\r\n\x1a\n" + bytes(60), "no picture that Pillow reads"),
    "a TGA by another name, which has no signature": (picture("TGA"), "no picture that Pillow reads"),
    "a web page": (b"<html>404</html>", "a web page"),
    "nothing": (b"", "the file is empty"),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_videos_documents_and_huge_images_are_refused(tmp_path: Path, kind: str) -> None:
    content, said = PICTURES[kind]
    (tmp_path / "a.png").write_bytes(content)
    images = open_images(tmp_path, image_shape=SHAPE, transform=_never)
    refused(lambda: next(images.batches(1)), said)


def test_file_larger_than_any_image_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(2**40)
    with cheap():
        images = open_images(tmp_path, image_shape=SHAPE, transform=_never)
    refused(lambda: next(images.batches(1)), "larger than any picture")


# tar


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, pax: dict[str, str] | None = None) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.pax_headers = kind, pax or {}
    info.linkname = "/etc/passwd"
    return info


def with_size(path: Path, field: bytes) -> Path:
    """The size of the first member as it is said, with a checksum that fits."""
    content = bytearray(path.read_bytes())
    content[124:136] = field
    content[148:156] = b" " * 8
    content[148:156] = f"{sum(content[:512]):06o}\0 ".encode()
    path.write_bytes(bytes(content))
    return path


ODD_SIZE = b"\xff" * 10 + b"\xfe\x00"
OF_MEMBER: dict[str, tuple[tarfile.TarInfo, str]] = {
    "a negative size in an extended header": (member("a.png", pax={"size": "-1024"}), "-1024 bytes, and"),
    "a size of 5,000 digits": (member("a.png", pax={"size": "9" * 5000}), "a header is damaged"),
    "a parent's path": (member("../x.png"), "leaves the archive"),
    "an absolute path": (member("/etc/x.png"), "leaves the archive"),
    "a long path that leaves": (member("a/" * 80 + "../" * 90 + "x.png"), "leaves the archive"),
    "a symbolic link": (member("a.png", tarfile.SYMTYPE), "is a link"),
    "a hard link": (member("a.png", tarfile.LNKTYPE), "is a link"),
    "a device": (member("a.png", tarfile.CHRTYPE), "a device"),
    "a sparse file": (member("a.png", pax={"GNU.sparse.major": "1", "GNU.sparse.size": "9"}), "sparse"),
}
TARS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a negative size": (
        lambda path: with_size(tar_of(path, (member("a.png"), bytes(600))), ODD_SIZE),
        "-512 bytes, and",
    ),
    "a size beyond the file": (
        lambda path: with_size(tar_of(path, (member("a.png"), b"x")), b"77777777777\0"),
        "8589934591 bytes, and",
    ),
    "a header of 1 GB": (
        lambda path: with_size(tar_of(path, (member("x", tarfile.XHDTYPE), b"")), b"07777777777\0"),
        "at most",
    ),
    "a packed archive": (lambda path: path.write_bytes(zlib.compress(bytes(9000))), "not a valid uncompressed tar"),
}


@pytest.mark.parametrize("kind", [*TARS, *OF_MEMBER])
def test_tar_file_is_read_forward_only(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tar"
    if kind in TARS:
        make, said = TARS[kind]
        make(path)
    else:
        info, said = OF_MEMBER[kind]
        form = tarfile.GNU_FORMAT if "long" in kind else tarfile.PAX_FORMAT
        tar_of(path, (info, b"x" if info.isreg() else b""), form=form)
    refused(lambda: open_images(path, image_shape=SHAPE, transform=_never), said)


def test_chain_of_extended_tar_headers_is_bounded(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "one.tar", (member("a.png", pax={"comment": "x"}), b"y")).read_bytes()
    head, rest = whole[:1024], whole[1024:]
    (tmp_path / "long.tar").write_bytes(head * 2_000 + rest)
    with cheap():
        refused(lambda: list(members_of_tar(tmp_path / "long.tar")), "not a valid uncompressed tar")


def test_shard_pattern_is_counted_before_expansion() -> None:
    for pattern in ("a-{0..999999999999}.tar", "a-{0..999}-{0..999}.tar"):
        refused(lambda pattern=pattern: places_from_pattern(pattern), "100000 at most")  # type: ignore[misc]
    assert places_from_pattern("a-{0..9999999999999999}.tar") == [Path("a-{0..9999999999999999}.tar")]
    assert places_from_pattern("a-{٣..٤}.tar") == [Path("a-{٣..٤}.tar")]


# Weights


class Rebuilt:
    """A tensor as a checkpoint says it: any shape and stride over any numbers."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.size, self.stride, self.numbers = size, stride, torch.zeros(4)

    def __reduce__(self) -> tuple[Any, ...]:
        held = torch.storage.TypedStorage(
            wrap_storage=self.numbers.untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (held, 0, self.size, self.stride, False, OrderedDict())


TENSORS = {
    "10^12 numbers in 16 bytes": (Rebuilt((10**6, 10**6), (0, 0)), "16 bytes for a shape of"),
    "numbers beyond the file": (Rebuilt((10**9,), (1,)), "can't be read"),
    "a negative size": (Rebuilt((-1,), (1,)), "can't be read"),
    "more numbers than 64 bits count": (Rebuilt((2**62, 2**62), (0, 0)), "can't be read"),
    "names that are no texts": ({("a",) * 9: torch.ones(1)}, "with other content (tuple"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_checkpoint_must_hold_the_declared_numbers(tmp_path: Path, kind: str) -> None:
    content, said = TENSORS[kind]
    torch.save(content if isinstance(content, dict) else {"a": content}, tmp_path / "w.pth")
    refused(lambda: read_weights(tmp_path / "w.pth"), said.replace("(", r"\("))


def test_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as plain, zipfile.ZipFile(tmp_path / "p.pth", "w", 8) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    refused(lambda: read_weights(tmp_path / "p.pth"), "its members are compressed")


GLOBAL = b"\x80\x02cposix\nmkdir\nX\x06\x00\x00\x00canary\x85R."


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".ckpt", ".tar"])
def test_pickle_opcodes_that_name_code_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    tried: list[bool] = []
    load = torch.load

    def noted(path: Path, **options: Any) -> Any:
        tried.append(options["weights_only"])
        return load(path, **options)

    monkeypatch.setattr(torch, "load", noted)
    (tmp_path / f"w{suffix}").write_bytes(GLOBAL)
    refused(lambda: read_weights(tmp_path / f"w{suffix}"), "pickled code|can't be read")
    assert tried == [True], "once, and never with all of pickle"
    assert not (tmp_path / "canary").exists()


def header_of(text: str, content: bytes = bytes(16), *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + content


def entry(**changes: Any) -> str:
    return json.dumps({"images": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes})


SAFETENSORS = {
    "a length beyond the file": header_of("{}", length=2**60),
    "a length of 100 MB and more": header_of(entry(), length=100_000_001),
    "no JSON": header_of("{" * 100),
    "nested deep": header_of("[" * 100_000),
    "a hole": header_of(entry(data_offsets=[8, 16], shape=[2])),
    "two in one place": header_of(
        json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("images", "b")})
    ),
    "bytes behind the end": header_of(entry(), bytes(20)),
    "offsets beyond the end": header_of(entry(data_offsets=[0, 32], shape=[8])),
    "offsets that run backwards": header_of(entry(data_offsets=[16, 0])),
    "a shape that the bytes don't hold": header_of(entry(shape=[10**12])),
    "a shape beyond 64 bits": header_of(entry(shape=[2**63, 2**63])),
    "a negative size": header_of(entry(shape=[-4])),
    "an unknown type": header_of(entry(dtype="F3")),
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_broken_safetensors_header_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(SAFETENSORS[kind])
    refused(lambda: read_weights(path), "can't be read as safetensors")
    refused(lambda: store.load_moments(path), "not a valid safetensors file")
    refused(lambda: open_images(path, image_shape=SHAPE, transform=_never), "not a valid .safetensors file")


def test_empty_tensor_of_any_size_allocates_nothing(tmp_path: Path) -> None:
    text = json.dumps({"images": {"dtype": "F32", "shape": [0, 2**40, 2**20], "data_offsets": [0, 0]}})
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_of(text, b""))
    refused(lambda: open_images(path, image_shape=SHAPE, transform=_never), "expected float32|not a whole")
    with cheap():
        assert read_weights(path).state["images"].numel() == 0


def test_long_safetensors_names_are_shortened(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes({"n" * 10**6: torch.ones(1)}))
    refused(lambda: open_images(tmp_path / "x.safetensors", image_shape=SHAPE, transform=_never), "no key 'images'")


# Texts


# Names that files give


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "..\\x"])
def test_name_that_leaves_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    refused(lambda: path_inside(tmp_path, name, where="record"), "record: .* leads out of its directory")


def test_name_through_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "release" / "in").mkdir(parents=True)
    (tmp_path / "release" / "in" / "x.npy").write_bytes(b"x")
    assert path_inside(tmp_path / "release", "in/x.npy", where="r") == tmp_path / "release" / "in" / "x.npy"
    (tmp_path / "release" / "out").symlink_to(tmp_path)
    (tmp_path / "release" / "x.npy").symlink_to(tmp_path / "release" / "in" / "x.npy")
    for name in ("out/x", "x.npy"):
        refused(lambda name=name: path_inside(tmp_path / "release", name, where="r"), "is a link")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["../images.npy", "/etc/images.npy"])
def test_release_samples_must_lie_in_the_release(tmp_path: Path, name: str) -> None:
    np.save(tmp_path / "images.npy", np.zeros((1, *SHAPE), np.float32))
    for images, expected in ((name, "a.npy"), ("images.npy", name)):
        graphs = {"m.onnx": {"expected": expected, "max_relative_error": 1.0}}
        record = {"kind": "corp-deploy/samples", "version": 1, "images": images, "count": 1, "graphs": graphs}
        write_json(tmp_path / "r" / "samples" / "samples.json", record)
        np.save(tmp_path / "r" / "images.npy", np.zeros((1, *SHAPE), np.float32))
        refused(lambda: replay(tmp_path / "r"), "leads out of its directory")


def test_checksum_list_of_a_release_cannot_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "SHA256SUMS").symlink_to("/dev/zero")
    assert check_release(tmp_path / "r").differs == ("SHA256SUMS: a link, expected the file itself",)


# From the command line


def test_commands_end_with_exit_code_2_and_one_message(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png(20_000, 20_000))
    (tmp_path / "x.npy").write_bytes(NPY["10^12 images"][0])
    TARS["a negative size"][0](tmp_path / "x.tar")
    packed(tmp_path / "x.npz", says=4_000_000_000)
    (tmp_path / "x.safetensors").write_bytes(SAFETENSORS["a hole"])
    for images in ("pictures", "x.npy", "x.tar", "x.npz", "x.safetensors"):
        words = ("calibrate", "--model", dense, "--images", tmp_path / images, "-o", tmp_path / "m.safetensors")
        done = invoked(*words, code=2)
        assert done.stderr.splitlines()[-1].startswith("Error: ")
        assert "Traceback" not in done.output
        assert len(done.stderr) < 1500
        assert not (tmp_path / "m.safetensors").exists()


# A journal of files that were replaced, from anybody


JOURNALS = [json.dumps([name]) for name in ("", "sub/..", "../beside", "link/file", ".former", "/etc/hostname", "a\0b")]


@pytest.mark.parametrize("journal", [*JOURNALS, "{", "[]"])
def test_foreign_journal_removes_nothing(tmp_path: Path, journal: str) -> None:
    """Files of a directory are put back before it is read: its journal may come from whoever made it."""
    place, beside = tmp_path / "model", tmp_path / "beside"
    for path in (place / "sub" / "file", beside / "file", place / ".former" / "config.json"):
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    (place / "link").symlink_to(beside)
    (place / ".former" / "link").mkdir()
    (place / ".former" / "link" / "file").write_text("theirs")
    (place / ".former" / ".absent.json").write_text(journal)
    said = {"[]": "is a link", "{": "this tool did not write this journal"}
    rejects(said.get(journal, "."), roll_back_interrupted, place)
    assert (place / "sub" / "file").read_text() == (beside / "file").read_text() == "kept"
    assert (place / ".former" / "config.json").exists() == (journal != "[]"), "what one was put back before the link"


def test_image_is_read_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("JPEG"))
    images = open_images(tmp_path, image_shape=SHAPE, transform=lambda _: torch.ones(SHAPE))
    assert next(images.batches(1)).shape == (1, *SHAPE)


def test_group_labels_are_bounded_in_size(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, *SHAPE), np.float32))
    images = open_images(tmp_path / "x.npy", image_shape=SHAPE, transform=_never)
    (tmp_path / "labels.json").write_text("[" * 100_000)
    refused(lambda: group_ids(images, str(tmp_path / "labels.json")), "nested too deep")
