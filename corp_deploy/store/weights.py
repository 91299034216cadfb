"""State dicts as people have them: files of several kinds, shards, wrappers and moving averages. What torch.save wrote
is read without running any of it: never by the pickle that runs code, and never tried again.

What is read here is names and tensors; whether they fit a model is asked in weight_fit.
"""

import argparse
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ground.errors import BadInput
from ground.files import regular_file
from ground.records import record_from_file

LONGEST_NAME = 150
# timm's trainer keeps its arguments beside the weights: a Namespace holds values and runs nothing.
_HARMLESS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [argparse.Namespace]


def first_names(names: list[str]) -> str:
    """A few names for a message, and how many more there are."""
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in names[:3]]
    return ", ".join(cut) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _refuse_packed(path: Path) -> None:
    """Raise BadInput for an archive whose members are packed, which torch never does: little would become much."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    packed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if packed or sum(member.file_size for member in members) > path.stat().st_size:
        raise BadInput(
            f"{path}: its members are packed or lie over one another, {first_names(packed or ['all'])}; expected a "
            "file as torch.save writes it"
        )


def _refused(path: Path, error: Exception) -> BadInput:
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
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
    """Tensors, texts and numbers in mappings and lists. Raises BadInput for pickled code and for a damaged file."""
    try:
        _refuse_packed(path)
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own, about how odd tensors are kept; those are refused later
            return torch.load(path, map_location="cpu", weights_only=True)
    except BadInput:
        raise
    except Exception as error:
        raise _refused(path, error) from None


State = Mapping[str, torch.Tensor]

KINDS = ".safetensors, .pth, .pt, .pth.tar, .bin, .ckpt, or the .index.json of shards"
_PICKLES = (".pth", ".pt", ".tar", ".bin", ".ckpt")
_INDEX = ".index.json"
# timm's order: its own trainer's names, then DeiT's.
_AVERAGES, _RAW = ("state_dict_ema", "model_ema"), ("state_dict", "model")
# Put before names by DistributedDataParallel and torch.compile; by a LightningModule and Hugging Face's timm wrapper.
_WRAPPERS, _OWNERS = ("module.", "_orig_mod."), ("model.", "timm_model.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a file by their bare names. `entry` is the file's entry they were under, or nothing.

    `notes`: what a user should know about what was taken and left.
    """

    path: Path
    state: State
    entry: str = ""
    notes: tuple[str, ...] = ()


@contextmanager
def _as_safetensors(path: Path) -> Iterator[None]:
    """Raises BadInput for a file that is none."""
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
    """The files of an index with the names that each must hold. Raises BadInput for a path that leaves the folder."""
    files: dict[str, list[str]] = {}
    for name, file in record_from_file(index, _ShardIndex, remedy="expected an index of shards").weight_map.items():
        files.setdefault(file, []).append(name)
    for file in files:
        if Path(file).name != file or file.endswith(_INDEX):
            raise BadInput(f"{index}: the shard {file!r:.150} is no file name beside the index")
    return files


def _content(path: Path) -> Any:
    if not path.is_file():
        raise BadInput(f"{path}: no such file, expected weights ({KINDS})")
    if path.name.endswith(_INDEX):
        state: dict[str, torch.Tensor] = {}
        for file, names in _shards(path).items():
            shard = _content(path.parent / file)
            absent = [name for name in names if not isinstance(shard, Mapping) or name not in shard]
            if absent:
                raise BadInput(f"{path.parent / file}: no {first_names(absent)}, which {path.name} says is here")
            state |= {name: shard[name] for name in names}
        return state
    if path.suffix == ".safetensors":
        with _as_safetensors(path):
            return load_file(path)
    if path.suffix in _PICKLES:
        return content_of_torch_file(path)
    raise BadInput(f"{path}: weights of kind {path.suffix!r}, expected {KINDS}")


def _entries(content: Any, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]


def _entry(content: Any, ema: bool | None, path: Path) -> tuple[str, tuple[str, ...]]:
    """The entry to take, the moving average first as timm does unless `ema` says otherwise; a note on the choice."""
    averages, raw = _entries(content, _AVERAGES), _entries(content, _RAW)
    if ema is True and not averages:
        raise BadInput(f"{path}: --ema, but there is no {' or '.join(_AVERAGES)} in it; leave --ema out")
    if ema is False and averages and not raw:
        raise BadInput(f"{path}: --no-ema, but it holds {averages[0]} alone; leave --no-ema out")
    entry = next(iter(raw if ema is False else [*averages, *raw]), "")
    if entry in averages:
        other = f"; --no-ema takes {raw[0]}" if raw else ""
        return entry, (f"{path.name}: took {entry}, the moving average of the weights, as timm does{other}",)
    return entry, (f"{path.name}: took {entry}, not the moving average {averages[0]}",) if averages else ()


def _refuse_clash(path: Path, names: list[str]) -> None:
    if names:
        raise BadInput(
            f"{path}: {first_names(names)} is there with and without a wrapper's prefix; save one of the two"
        )


def _unwrapped(state: State, path: Path) -> tuple[State, list[str]]:
    """Bare names, and those that stand beside the model in the object that was saved."""
    beside: list[str] = []
    inner = {name.replace("._orig_mod.", "."): value for name, value in state.items()}
    _refuse_clash(path, sorted(name for name in state if "._orig_mod." in name) if len(inner) < len(state) else [])
    state = inner
    while True:
        prefix = next((each for each in (*_WRAPPERS, *_OWNERS) if any(name.startswith(each) for name in state)), None)
        if prefix is None:
            return state, beside
        inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        outside = {name: value for name, value in state.items() if not name.startswith(prefix)}
        _refuse_clash(path, sorted(inside.keys() & outside.keys()))
        if prefix in _OWNERS:
            beside += sorted(outside)
            state = inside
        else:
            state = inside | outside


def _fault(tensor: torch.Tensor) -> str:
    """Why a tensor's values can't be taken as they are, or nothing."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_meta:
        return "without values"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    stored = tensor.untyped_storage().nbytes()
    return f"{stored} bytes said to be {list(tensor.shape)}" if tensor.numel() * tensor.itemsize > stored else ""


def _tensors(content: Any, path: Path) -> State:
    if not isinstance(content, Mapping):
        raise BadInput(f"{path}: expected a state_dict (names to tensors), got {type(content).__name__}")
    if not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()):
        keys = first_names([key if isinstance(key, str) else type(key).__name__ for key in content])
        raise BadInput(
            f"{path}: expected a state_dict (names to tensors), got {type(content).__name__} with other content "
            f"({keys}); weights are looked for under {', '.join((*_AVERAGES, *_RAW))}"
        )
    odd = [f"{name[:LONGEST_NAME]} ({fault})" for name, value in content.items() if (fault := _fault(value))]
    if odd:
        raise BadInput(f"{path}: {first_names(odd)}: expected dense tensors with their values; save them as such")
    return content


def read_weights(path: Path, *, ema: bool | None = None) -> Weights:
    """The weights of a file or of shards, wrappers' prefixes taken off.

    `ema`: take the moving average (True), the raw weights (False), or the former where there is one, as timm does.
    Raises BadInput for a missing or damaged file, for pickled code, and for an `ema` that the file can't follow.
    """
    content = _content(path)
    entry, notes = _entry(content, ema, path)
    inner = content[entry] if entry else content
    while nested := _entries(inner, _RAW):
        inner = inner[nested[0]]
    state, beside = _unwrapped(_tensors(inner, path), path)
    if beside:
        notes += (f"{path.name}: left out what stands beside the model: {first_names(beside)}",)
    return Weights(path=path, state=state, entry=entry, notes=notes)


def state_as_named(path: Path) -> State:
    """The tensors of a file or of shards by the names that they have there. Raises BadInput as `read_weights`."""
    return _tensors(_content(path), path)


def files_of_tensors(path: Path) -> dict[str, Path]:
    """The safetensors file of each tensor by name. Raises BadInput for a missing, damaged or other file."""
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
    with _as_safetensors(path), safe_open(regular_file(path), framework="pt") as file:
        return list(file.keys())
