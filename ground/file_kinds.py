"""Detection of a file's kind by its first bytes, with advice for a file of another kind than the expected one."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import BadInput
from .files import regular_file

SAFETENSORS, TORCH = "safetensors", "a checkpoint of torch.save"
AS_SAFETENSORS = "save the weights as such: model.save_pretrained(DIR)"
NUMPY, ONNX = "an array of numpy (.npy)", "an ONNX graph"
LONGEST = 1024
_LONGEST_HEADER = 100_000_000  # that safetensors reads


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file, and what to do to get weights from a file of this kind."""

    name: str
    remedy: str = ""


_UNPACK = "unpack it first, and give the file inside"
_PICTURE = "give the file of the weights"
_AGAIN = (
    "the download saved that in place of the file (a wrong address, a login, a licence to accept): download it again"
)
_STAND_INS = (
    (
        re.compile(rb"version https://git-lfs\.github\.com/spec/"),
        FileKind("a Git LFS pointer, not the file that it stands for", "fetch that: git lfs pull, in its repository"),
    ),
    (
        re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(!doctype html|html|head|body)\b", re.I | re.S),
        FileKind("a web page (HTML)", _AGAIN),
    ),
    (re.compile(rb"\s*<\?xml\b.*<(Error|html)\b", re.I | re.S), FileKind("a server's answer (XML)", _AGAIN)),
)
_EMPTY = FileKind("an empty file", "its download or copy didn't finish: get it again")
# Offset and signature of each kind.
_MAGIC: tuple[tuple[int, bytes, FileKind], ...] = (
    (0, b"\x93NUMPY", FileKind(NUMPY, "save the model's state_dict() by torch.save or as safetensors")),
    (0, b"\x89HDF\r\n\x1a\n", FileKind("HDF5, as Keras and TensorFlow write weights", "give weights of PyTorch")),
    (0, b"\x1f\x8b", FileKind("packed by gzip", _UNPACK)),
    (0, b"BZh", FileKind("packed by bzip2", _UNPACK)),
    (0, b"\xfd7zXZ\0", FileKind("packed by xz", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", FileKind("packed by zstd", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("packed by 7-Zip", _UNPACK)),
    (0, b"Rar!", FileKind("a RAR archive", _UNPACK)),
    (257, b"ustar", FileKind("a tar archive", _UNPACK)),
    (0, b"GGUF", FileKind("GGUF, as llama.cpp writes", "give the weights that it was made of")),
    (4, b"TFL3", FileKind("a model of TensorFlow Lite", "give weights of PyTorch")),
    (0, b"ftrt", FileKind("an engine of TensorRT", "give the weights that it was built of")),
    (0, b"ptrt", FileKind("an engine of TensorRT", "give the weights that it was built of")),
    (0, b"\x89PNG", FileKind("a picture (PNG)", _PICTURE)),
    (0, b"\xff\xd8\xff", FileKind("a picture (JPEG)", _PICTURE)),
    (0, b"%PDF", FileKind("a PDF", _PICTURE)),
)
# Patterns of member names that show which program wrote a zip archive; the first that matches decides.
_MEMBERS = (
    (
        r"(^|/)constants\.pkl$",
        FileKind(
            "a TorchScript archive, which holds code",
            "save its weights: torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')",
        ),
    ),
    (r"(^|/)data\.pkl$", FileKind(TORCH)),
    (
        r"(^|/)(serialized_exported_program\.json|models/[^/]+\.json|archive_format)$",
        FileKind(
            "an exported program of torch.export",
            "save its weights: torch.save(torch.export.load(FILE).state_dict, 'weights.pth')",
        ),
    ),
    (r"\.npy$", FileKind("arrays of numpy (.npz)", "save the model's state_dict() by torch.save or as safetensors")),
    (r"\.weights\.h5$", FileKind("a model of Keras", "give weights of PyTorch")),
    (r"", FileKind("a zip archive", _UNPACK)),
)
_ONNX_HEAD = re.compile(rb"\x08[\x01-\x20](\x12|\x1a|:|B)", re.S)


def _find_zip_kind(path: Path) -> FileKind:
    if not zipfile.is_zipfile(path):
        return FileKind("a zip archive that is cut short", "its download or copy didn't finish: get it again")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    return next(kind for pattern, kind in _MEMBERS if not pattern or any(re.search(pattern, name) for name in names))


def stand_in(head: bytes) -> FileKind | None:
    """Return the kind of an empty file, a Git LFS pointer, a web page or a server's XML error; None for others."""
    if not head:
        return _EMPTY
    return next((kind for pattern, kind in _STAND_INS if pattern.match(head)), None)


def kind_of_file(path: Path) -> FileKind | None:
    """Return the kind of an existing file; None if its first bytes don't tell."""
    with regular_file(path).open("rb") as file:
        head = file.read(LONGEST)
        size = file.seek(0, 2)
    if (other := stand_in(head)) is not None:
        return other
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _find_zip_kind(path)
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= header_bytes <= (_LONGEST_HEADER if head[9:10] == b'"' else size - 8):
        return FileKind(SAFETENSORS)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return FileKind(TORCH)
    if _ONNX_HEAD.match(head):
        return FileKind(ONNX, "give the weights that it was exported of")
    return next((kind for at, magic, kind in _MAGIC if head[at:].startswith(magic)), _find_text_kind(head))


def _find_text_kind(head: bytes) -> FileKind | None:
    try:
        text = head[: LONGEST - 4].decode()  # a character may be cut at the end
    except UnicodeDecodeError:
        return None
    first = text.strip().partition("\n")[0]
    return FileKind(f"a text, {first[:60]!r}", _AGAIN) if first.isprintable() and text.strip() else None


def refuse_stand_in(head: bytes, where: str) -> None:
    """Raise BadInput for the first bytes of a Git LFS pointer, a web page or a server's XML error."""
    kind = stand_in(head[:LONGEST]) if head else None
    if kind is not None:
        raise BadInput(f"{where}: {kind.name}; {kind.remedy}")


def refuse_stand_in_file(path: Path) -> None:
    """Raise BadInput for a Git LFS pointer, web page or server's XML error, FileNotFoundError for a missing file."""
    with regular_file(path).open("rb") as file:
        refuse_stand_in(file.read(LONGEST), str(path))


def require_kind(path: Path, name: str, remedy: str) -> None:
    """Raise BadInput if a file's kind is recognised and isn't `name`; a file of no recognised kind passes."""
    kind = kind_of_file(path)
    if kind is not None and kind.name != name:
        raise BadInput(f"{path}: {kind.name}, expected {name}; {kind.remedy or remedy}")
