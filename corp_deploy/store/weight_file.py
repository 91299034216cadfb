"""Files of weights in several formats and in shards, read whole and without running code.

Files of torch.save are unpickled with weights_only, never by the pickle that runs code. `weights` decides which entries
of the content are a model's.
"""

import argparse
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ground.errors import BadInput
from ground.file_kinds import AS_SAFETENSORS, SAFETENSORS, TORCH, kind_of_file, require_kind
from ground.files import regular_file
from ground.records import record_from_file

State = Mapping[str, torch.Tensor]
LONGEST_NAME = 150
KINDS = ".safetensors, .pth, .pt, .pth.tar, .bin, .ckpt, or the .index.json of shards"
SUFFIX = ".safetensors"
_PICKLES = (".pth", ".pt", ".tar", ".bin", ".ckpt")
_INDEX = ".index.json"


class _Inert:
    """A stand-in for an object of a checkpoint that is no tensor, such as a number of numpy or a path."""

    def __init__(self, *_: object) -> None:
        """Take any arguments."""

    def __new__(cls, *_: object) -> "_Inert":
        """Take any arguments."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Take any state."""


def _no_entries(*_: object) -> dict[Any, Any]:
    return {}


def _no_items(*_: object) -> list[Any]:
    return []


_NUMPY = ("multiarray.scalar", "multiarray._reconstruct", "numeric._frombuffer")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_VALUES = (
    *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in _NUMPY),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    *(f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *("numpy.dtype", "numpy.ndarray", "builtins.range", "builtins.slice", "torch.torch_version.TorchVersion"),
    *("types.SimpleNamespace", "decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
)
# Trainers save arguments and results beside the weights; objects of these classes hold values and run nothing.
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *(argparse.Namespace, Counter, list, dict, set, frozenset, int, float, str, bool, bytes, complex),
    *((_no_entries, "collections.defaultdict"), (_no_items, "collections.deque")),
    *((_Inert, name) for name in _VALUES),
]


def first_names(names: list[str]) -> str:
    """Return the first three names for a message, and the number of the others."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:3]]
    return ", ".join(cut) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_packed(path: Path) -> None:
    """Raise BadInput for an archive with compressed members, which torch never writes and could fill the memory."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise BadInput(
            f"{path}: its members are compressed or overlap, {first_names(packed or ['all'])}; expected a "
            "file as torch.save writes it"
        )


def _refused(path: Path, error: Exception) -> BadInput:
    try:
        with torch.serialization.safe_globals(_HARMLESS), path.open("rb") as file:
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # a damaged file, whose first error says more
        foreign = []
    if foreign:
        return BadInput(
            f"{path}: holds pickled code, which is never run ({first_names(sorted(foreign))}); save its weights alone: "
            "torch.save(model.state_dict(), 'weights.pth'), or as safetensors"
        )
    reason = type(error).__name__ if isinstance(error, UnpicklingError) else str(error).partition("\n")[0][:150]
    return BadInput(
        f"{path}: can't be read as a PyTorch checkpoint of plain tensors ({reason}); "
        "(a) the file is damaged, or (b) it holds pickled code, which is never run: save its weights as safetensors"
    )


def content_of_torch_file(path: Path) -> Any:
    """Return a file's tensors, texts and numbers in mappings and lists. Raises BadInput for code and damaged files."""
    try:
        _refuse_packed(path)
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of tensors in odd formats, which are refused later
            with path.open("rb") as file:  # with a path torch would choose the format by the name's suffix
                return torch.load(file, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:
        raise _refused(path, error) from None


@contextmanager
def _as_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{path}: can't be read as safetensors ({error!s:.300}); the file is truncated or of another kind"
        ) from None


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _shards(index: Path) -> dict[str, list[str]]:
    """Return the names that each file of an index must hold. Raises BadInput for a path that leaves the folder."""
    files: dict[str, list[str]] = {}
    for name, file in record_from_file(index, _ShardIndex, remedy="expected an index of shards").weight_map.items():
        files.setdefault(file, []).append(name)
    for file in files:
        if Path(file).name != file or file.endswith(_INDEX):
            raise BadInput(f"{index}: the shard {file!r:.150} is no file name beside the index")
    return files


def content_of_weight_file(path: Path) -> Any:
    """Return the content of a file, by its first bytes, or of an index's shards. Raises BadInput if unreadable."""
    if path.is_dir():
        raise BadInput(f"{path}: a directory, expected a file of weights ({KINDS}); or give --model {path}")
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected weights ({KINDS})")
    if path.name.endswith(_INDEX):
        return _content_of_shards(path)
    kind = kind_of_file(path)
    if kind is not None and kind.name not in (SAFETENSORS, TORCH):
        raise BadInput(f"{path}: {kind.name}, expected weights ({KINDS}); {kind.remedy}")
    if kind is None and path.suffix not in (SUFFIX, *_PICKLES):
        raise BadInput(f"{path}: its content is no known format of weights, expected {KINDS}")
    if path.suffix == SUFFIX if kind is None else kind.name == SAFETENSORS:
        with _as_safetensors(path):
            return load_file(path)
    return content_of_torch_file(path)


def _content_of_shards(index: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file, names in _shards(index).items():
        shard = content_of_weight_file(index.parent / file)
        absent = [name for name in names if not isinstance(shard, Mapping) or name not in shard]
        if absent:
            raise BadInput(f"{index.parent / file}: no {first_names(absent)}, which {index.name} says is here")
        state |= {name: shard[name] for name in names}
    return state


def files_of_tensors(path: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor by name. Raises BadInput for a missing, damaged or other file."""
    if path.name.endswith(_INDEX):
        files = {name: path.parent / file for file, names in _shards(path).items() for name in names}
    else:
        files = dict.fromkeys(_names_in(path), path)
    for file in sorted(set(files.values())):
        stored_names = set(_names_in(file))
        if absent := [name for name, own in files.items() if own == file and name not in stored_names]:
            raise BadInput(f"{file}: no {first_names(absent)}, which {path.name} says is here")
    return files


def _names_in(path: Path) -> list[str]:
    if path.is_file():
        require_kind(path, SAFETENSORS, AS_SAFETENSORS)
    with _as_safetensors(path), safe_open(regular_file(path), framework="pt") as file:
        return list(file.keys())
