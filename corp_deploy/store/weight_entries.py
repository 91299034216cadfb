"""The state dicts in the content of a checkpoint: the content itself, or the values of its keys."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ground.errors import BadInput

from .weight_file import LONGEST_NAME, State, first_names

_DEEPEST, _MOST = 4, 64
_AVERAGE = re.compile(r"(^|_)(ema|swa|averaged?|avg|shadow|polyak)(_|$)", re.IGNORECASE)
# Keys of raw weights in the order in which they are taken, that of timm's trainer first; then those of two networks
# that learn from one another, of which the teacher is evaluated.
_RAW = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "module", "params", "weights")
_PAIRS = ("teacher", "target", "student", "online")
_NO_WEIGHTS = re.compile(
    r"optim|sched|scaler|callback|loops|hyper_param|hparams|rng_|history|loss|metric", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A state dict with the keys that lead to it, joined by dots; no key for the whole file."""

    key: str
    state: State
    others: tuple[str, ...] = ()  # names of values that are no tensors
    is_nameless: bool = False  # whether the names are places in a list


def is_average(key: str) -> bool:
    """Return whether a key or a prefix names a moving average."""
    return any(_AVERAGE.search(part) for part in key.split("."))


def rank(key: str) -> int:
    """Return the rank of a key in _RAW, then _PAIRS, 0 for the file itself; the lowest is taken first."""
    parts = key.lower().split(".")
    return next((place for place, word in enumerate((*_RAW, *_PAIRS)) if word in parts), len(_RAW) if key else 0)


def entries_in(content: Any, path: Path) -> list[Entry]:
    """Return the state dicts in a file's content, at most _MOST. Raises BadInput where there are none."""
    if not isinstance(content, Mapping | list | tuple):
        raise BadInput(f"{path}: expected a state_dict (names to tensors), got {type(content).__name__}")
    found = list(_found(content, (), 0))[:_MOST]
    if not found:
        keys = content if isinstance(content, Mapping) else ()
        shown = first_names([key if isinstance(key, str) else type(key).__name__ for key in keys])
        raise BadInput(
            f"{path}: expected a state_dict (names to tensors), got {type(content).__name__} with other content "
            f"({shown or 'nothing'}); save the model's: torch.save(model.state_dict(), 'weights.pth')"
        )
    return found


def _found(content: Any, keys: tuple[str, ...], depth: int) -> Iterator[Entry]:
    pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
    inside = False
    for key, value in pairs if depth < _DEEPEST else ():
        if not isinstance(value, Mapping | list | tuple):
            continue
        for entry in _found(value, (*keys, str(key)), depth + 1):
            if is_average(entry.key) or not _NO_WEIGHTS.search(str(key)):
                inside = True
                yield entry
    if inside:
        return
    if not isinstance(content, Mapping):
        places = {str(place): value for place, value in enumerate(content) if isinstance(value, torch.Tensor)}
        if len(places) > 1 and is_average(".".join(keys)):
            yield Entry(".".join(keys), places, is_nameless=True)
        return
    state = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if state and 2 * len(state) > len(content) and all(isinstance(name, str) for name in content):
        others = tuple(name for name in content if name not in state)
        yield Entry(".".join(keys), state, others)


def _fault(tensor: torch.Tensor) -> str:
    """Return why a tensor's values can't be taken as they are; empty if they can."""
    if tensor.is_quantized:
        return "quantised"
    if tensor.is_meta:
        return "without values"
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    stored = tensor.untyped_storage().nbytes()
    return f"{stored} bytes for a shape of {list(tensor.shape)}" if tensor.numel() * tensor.itemsize > stored else ""


def require_plain(state: State, path: Path) -> None:
    """Raise BadInput for tensors that are not dense, or have no values."""
    odd = [f"{name[:LONGEST_NAME]} ({fault})" for name, value in state.items() if (fault := _fault(value))]
    if odd:
        raise BadInput(f"{path}: {first_names(odd)}: expected dense tensors with values; save them so")
