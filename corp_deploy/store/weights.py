"""A model's weights, chosen from a checkpoint of several state dicts, wrappers' prefixes and moving averages.

The model's own names decide which state dict is taken; notes tell what was taken, renamed and left out. Weights that
are saved in parts (pruning masks, weight norm, spectral norm) are folded. Shapes are checked in `weight_fit`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ground.errors import BadInput

from .weight_entries import Entry, entries_in, is_average, rank, require_plain
from .weight_file import State, content_of_weight_file, first_names
from .weight_names import SIMILAR, Named, clashing, named_for, without_wrappers


def masked(original: Tensor, mask: Tensor) -> Tensor:
    """Return the pruned weight of torch.nn.utils.prune: the original times the mask."""
    return original * mask.to(original.dtype)


def weight_normed(magnitude: Tensor, direction: Tensor) -> Tensor:
    """Return the weight of weight norm: the direction, scaled to the magnitude over the axes where that has size 1."""
    if magnitude.ndim not in (0, direction.ndim):
        raise ValueError(f"magnitudes {list(magnitude.shape)} of a direction {list(direction.shape)}")
    axes = [axis for axis in range(direction.ndim) if magnitude.ndim == 0 or magnitude.shape[axis] == 1]
    length = torch.linalg.vector_norm(direction, dim=axes, keepdim=True) if axes else direction.abs()
    return direction * (magnitude / length)


def spectral_normed(original: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the weight of spectral norm: the original over the largest singular value, from its stored vectors."""
    for axis in range(original.ndim):
        rows = original.movedim(axis, 0).flatten(1)
        if rows.shape == (len(left), len(right)):
            return original / (left @ rows @ right)
    raise ValueError(f"vectors of {len(left)} and {len(right)} beside a weight {list(original.shape)}")


@dataclass(frozen=True, slots=True)
class _Form:
    """A form in which torch saves a weight as several tensors, such as a magnitude and a direction."""

    label: str
    first: re.Pattern[str]
    """The pattern of the first part's name, with the groups `at` of the module's name and `name` of the weight's."""
    parts: tuple[str, ...]  # the names of the parts, in the order in which `whole` takes them
    whole: Callable[..., Tensor]


def _first(ending: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<at>.*\.|)(?P<name>[^.]+)_{ending}")


def _original(ending: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<at>.*\.|)parametrizations\.(?P<name>[^.]+)\.{ending}")


_INSIDE = "{at}parametrizations.{name}."
_VECTORS = ("{at}{name}_orig", "{at}{name}_u", "{at}{name}_v")
_FORMS = (
    _Form("pruning masks", _first("orig"), ("{at}{name}_orig", "{at}{name}_mask"), masked),
    _Form("weight norm", _first("g"), ("{at}{name}_g", "{at}{name}_v"), weight_normed),
    _Form("spectral norm", _first("orig"), _VECTORS, spectral_normed),
    _Form("weight norm", _original("original0"), (f"{_INSIDE}original0", f"{_INSIDE}original1"), weight_normed),
    _Form(
        "spectral norm",
        _original("original"),
        (f"{_INSIDE}original", f"{_INSIDE}0._u", f"{_INSIDE}0._v"),
        spectral_normed,
    ),
)


def folded_state(state: State, *, where: str) -> tuple[State, dict[str, str]]:
    """Return a state dict with folded weights, and the form of each by name. Raises BadInput for unlike parts."""
    whole, forms = dict(state), dict[str, str]()
    for form in _FORMS:
        for name in state:
            match = form.first.fullmatch(name)
            parts = [part.format(**match.groupdict()) for part in form.parts] if match else [""]
            if match is None or not all(part in whole for part in parts):
                continue
            folded = match["at"] + match["name"]
            try:
                whole[folded] = form.whole(*(whole.pop(part).detach() for part in parts))
            except (ValueError, RuntimeError) as error:
                raise BadInput(f"{where}: {folded}: {form.label} of shapes that don't fit ({error!s:.150})") from None
            forms[folded] = form.label
    return whole, forms


_NAMELESS = (
    "tensors without names, which can't be taken; put them into the model where it is trained, as ema.copy_to does, "
    "and save its state_dict()"
)
ITSELF = "the tensors of the file itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a file by a model's names, and the keys and prefix that they have in the file."""

    path: Path
    state: State
    entry: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Option:
    """A state dict of a file under a model's names, which may be chosen as the weights."""

    entry: Entry
    named: Named
    forms: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of this candidate state dict in the file: its keys and its prefix, joined by dots."""
        return ".".join(part for part in (self.entry.key, self.named.prefix.removesuffix(".")) if part)

    @property
    def shown(self) -> str:
        return self.label or ITSELF

    @property
    def notes(self) -> tuple[str, ...]:
        others = (f"left out what is no tensor: {first_names(list(self.entry.others))}",) if self.entry.others else ()
        return (*self.forms, *self.named.notes, *others)


def _options(entry: Entry, own: Collection[str] | None, path: Path) -> list[_Option]:
    if own is None:
        return [_Option(entry=entry, named=without_wrappers(entry.state))]
    named = named_for(entry.state, own)
    forms: tuple[str, ...] = ()
    if not named[0].is_complete:
        folded, kept_by = folded_state(entry.state, where=str(path))
        if kept_by:
            named = named_for(folded, own)
            kinds = " and ".join(dict.fromkeys(kept_by.values()))
            forms = (f"folded {kinds} into the weights of {first_names(list(kept_by))}",)
    return [_Option(entry=entry, named=each, forms=forms) for each in named]


def _entry_behind(key: str, entries: Sequence[Entry], path: Path) -> Entry:
    """Return the tensors under `key`, an entry's keys and then a prefix of names. Raises BadInput without any."""
    for entry in entries:
        above = f"{entry.key}." if entry.key else ""
        prefix = f"{key.removeprefix(above)}."
        inside = {name.removeprefix(prefix): each for name, each in entry.state.items() if name.startswith(prefix)}
        if key.startswith(above) and inside:
            return Entry(key, inside)
    held = first_names([f"{entry.key or ITSELF} ({first_names(list(entry.state))})" for entry in entries])
    raise BadInput(f"{path}: --weights-key {key!r:.100}: no tensors under it; it holds {held}")


def _best(options: Sequence[_Option]) -> list[_Option]:
    """Return the options with all of the model's names, else those with about as many as the best one."""
    whole = [option for option in options if option.named.is_complete]
    most = max((option.named.covered for option in options), default=0)
    return whole or [option for option in options if option.named.covered >= SIMILAR * most]


def _chosen(options: Sequence[_Option], ema: bool | None, path: Path) -> tuple[_Option, tuple[str, ...]]:
    """Return the option to take, a moving average first unless `ema` says otherwise, and a note on the choice."""
    averages = [option for option in options if is_average(option.label)]
    raw = [option for option in options if option not in averages]
    if ema is True and not averages:
        held = first_names([option.shown for option in raw])
        raise BadInput(
            f"{path}: --ema, but nothing in it is called a moving average, such as ema or state_dict_ema; it holds "
            f"{held}; leave --ema out, or name one of them by --weights-key"
        )
    if ema is False and not raw:
        raise BadInput(f"{path}: --no-ema, but it holds {averages[0].shown} alone; leave --no-ema out")
    best = _best(options if ema is None else averages if ema else raw)
    first = min(best, key=lambda option: (option not in averages, rank(option.label)))
    others = [option for option in options if option is not first]
    said = [first]
    note = f"took {first.shown}"
    if first in averages and raw:
        said.append(min(_best(raw), key=lambda option: rank(option.label)))
        note += f", the moving average of the weights; --no-ema takes {said[1].shown}"
    elif averages and first not in averages:
        said.append(averages[0])
        note += f", not the moving average {averages[0].shown}"
    if more := [option.shown for option in others if option not in said]:
        note += f"; it also holds {first_names(more)}, which --weights-key takes"
    return first, (note,) if others else ()


def read_weights(
    path: Path, own: Collection[str] | None = None, *, ema: bool | None = None, key: str | None = None
) -> Weights:
    """Return the weights of a file or of shards by a model's `own` names, or by the file's without wrappers' prefixes.

    `ema` takes the moving average (True), the raw weights (False), or the moving average if there is one (None). `key`
    takes the tensors under this key or prefix. Raises BadInput for a missing or damaged file, for pickled code, and
    for an `ema` or a `key` that the file does not have.
    """
    entries = entries_in(content_of_weight_file(path), path)
    nameless = [entry.key for entry in entries if entry.is_nameless]
    options = [option for entry in entries if not entry.is_nameless for option in _options(entry, own, path)]
    if not options or (ema and nameless and not any(is_average(option.label) for option in options)):
        raise BadInput(f"{path}: {nameless[0]}: {_NAMELESS}")
    if key is not None:
        under = [option for option in options if f"{option.label}.".startswith(f"{key}.")]
        options = under or _options(_entry_behind(key, entries, path), own, path)
    taken, notes = _chosen(options, ema, path)
    if names := [name for name in clashing(taken.named.state) if own is None or name not in own]:
        raise BadInput(
            f"{path}: {first_names(names)} is there with and without a wrapper's prefix; save one of the two"
        )
    require_plain(taken.named.state, path)
    unread = tuple(f"{each}: {_NAMELESS}" for each in nameless)
    notes = tuple(f"{path.name}: {note}" for note in (*notes, *taken.notes, *unread))
    return Weights(path=path, state=taken.named.state, entry=taken.label, notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChoice:
    """A file of weights and the choice of its entry, as in `read_weights`."""

    file: Path | None = None
    ema: bool | None = None
    key: str | None = None

    @property
    def settings(self) -> Mapping[str, object]:
        """The file, `ema` and `key` by the names of the options that set them."""
        return {"weights": self.file, "ema": self.ema, "weights_key": self.key}

    def read(self, file: Path, own: Collection[str]) -> Weights:
        """Return the weights of the file under a model's names."""
        return read_weights(file, own, ema=self.ema, key=self.key)


def state_as_named(path: Path) -> State:
    """Return the first state dict of a file or of shards by its own names. Raises BadInput as `read_weights` does."""
    state = entries_in(content_of_weight_file(path), path)[0].state
    require_plain(state, path)
    return state
