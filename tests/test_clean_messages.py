"""Messages hold no address of an object and no empty reason, whichever library worded them."""

import io
from pathlib import Path

import pytest

from ground.arrays import array_from_file, array_from_npy, array_from_npz, arrays_from_npz, arrays_from_safetensors
from ground.errors import BadInput, Missing, NotComparable
from tests.refusals import rejects


@pytest.mark.parametrize("kind", [BadInput, Missing, NotComparable])
def test_messages_contain_no_addresses(kind: type[Exception]) -> None:
    library = f"cannot identify image file {io.BytesIO()!r}"
    assert " at 0x" in library
    assert str(kind(f"a.png: not readable ({library}); remove it")).count("0x") == 0
    assert str(kind(f"x.pth: can't be read ({EOFError()}); (a) damaged")) == "x.pth: can't be read; (a) damaged"
    assert str(kind("address 0x10, block 0 at 0x1")) == "address 0x10, block 0 at 0x1"


@pytest.mark.parametrize(
    "read",
    [
        array_from_npy, arrays_from_npz, arrays_from_safetensors, lambda path: array_from_file(path, "x"),
        lambda path: array_from_npz(path, "x"),
    ],
)  # fmt: skip
def test_empty_array_file_is_called_empty(tmp_path: Path, read: object) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert callable(read)
    rejects(r"a: not a valid \.[a-z]+ file \(the file is empty\)", read, tmp_path / "a")
