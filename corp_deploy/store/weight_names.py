"""Renaming of a state dict to a model's names, by removing prefixes and wrapping modules."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from .weight_file import LONGEST_NAME, State, first_names

# Modules that wrap a model or a part of it: DistributedDataParallel, torch.compile, FSDP, activation checkpoints.
_AROUND = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Attributes in which Lightning modules and other wrappers have a model.
_OWNERS = ("model", "timm_model", "net", "network", "backbone", "encoder", "student", "teacher")
_COUNT = "num_batches_tracked"
SIMILAR = 0.8  # a prefix after which this share of the most names found is found counts too, as without a head
COUNTER = "n_averaged"  # the counter of torch's AveragedModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Named:
    """A state dict under a model's names."""

    state: State
    prefix: str = ""  # the prefix that was removed
    covered: int = 0  # the number of the model's names that the state dict has
    is_complete: bool = False  # whether it has all of them
    beside: tuple[str, ...] = ()  # the names of tensors that are no part of the model
    renamed: tuple[tuple[str, str], ...] = ()  # pairs of a model's name and the file's

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on names that were changed or left out."""
        first = ", ".join(f"{old} as {new}" for new, old in self.renamed[:1])
        notes = (f"renamed {len(self.renamed)} tensors, {first}",) if self.renamed else ()
        if not self.beside:
            return notes
        return (*notes, f"left out tensors beside the model: {first_names(sorted(self.beside))}")


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _AROUND)


def _bare_names(names: Collection[str]) -> dict[str, str] | None:
    """Return names by their bare ones, without wrapping modules; None where two names become one."""
    bare = {_bare(name): name for name in names}
    return bare if len(bare) == len(names) else None


def clashing(names: Collection[str]) -> list[str]:
    """Return the names that are there with and without a wrapping module."""
    return sorted(name for name in names if (bare := _bare(name)) != name and bare in names)


def _counts(names: Collection[str], own: Collection[str]) -> Counter[str]:
    """Return, by prefix, the number of a model's names that are among `names` after this prefix."""
    counts: Counter[str] = Counter()
    longest = max(map(len, own), default=0) + 2 * LONGEST_NAME  # a name of very many dots would take too long
    for name in names:
        at = len(name) if len(name) > longest else 0
        while True:
            if name[at:] in own:
                counts[name[:at]] += 1
            at = name.find(".", at) + 1
            if not at:
                break
    return counts


def _behind(state: State, theirs: dict[str, str], own: dict[str, str], prefix: str, covered: int) -> Named:
    """Return the tensors after a prefix; `theirs` and `own` are the file's and the model's names by their bare ones."""
    kept, renamed, beside = dict[str, str](), [], []
    for bare, name in theirs.items():
        if bare.startswith(prefix) and bare != COUNTER:
            new = own.get(bare.removeprefix(prefix), bare.removeprefix(prefix))
            kept[new] = name
            renamed += [(new, name)] if new != name else []
        else:
            beside.append(name)
    return Named(
        state={new: state[name] for new, name in kept.items()},
        prefix=prefix,
        covered=covered,
        is_complete=0 < covered == sum(not name.endswith(_COUNT) for name in own),
        beside=tuple(beside),
        renamed=tuple(renamed),
    )


def named_for(state: State, own: Collection[str]) -> list[Named]:
    """Return the state dict under a model's names, once for each prefix that may be removed, or as it is."""
    needed = [name for name in own if not name.endswith(_COUNT)]
    plain = {name: name for name in own}
    if all(name in state for name in needed):
        as_they_are = {name: name for name in state}
        return [_without_copies(_behind(state, as_they_are, plain, "", len(needed)), own)]
    ours, theirs = _bare_names(own), _bare_names(state)
    if ours is None or theirs is None:
        ours, theirs = plain, {name: name for name in state}
    counts = _counts(theirs, {name for name in ours if not name.endswith(_COUNT)})
    enough = max([min(len(needed), len(state)) / 2, *(SIMILAR * count for count in counts.values())])
    if chosen := [prefix for prefix, count in counts.items() if count >= enough]:
        whole = [prefix for prefix in chosen if counts[prefix] == len(needed)]
        return [_behind(state, theirs, ours, prefix, counts[prefix]) for prefix in whole or chosen]
    inner = {name.partition(".")[2]: full for name, full in ours.items()}
    is_one = len({name.partition(".")[0] for name in ours}) == 1  # the model wraps the network that was saved
    if is_one and all(name.partition(".")[2] in theirs for name in ours if not name.endswith(_COUNT)):
        return [_behind(state, theirs, inner, "", len(needed))]
    return [without_wrappers(state)]


def _without_copies(named: Named, own: Collection[str]) -> Named:
    """Return the model's tensors under its own names, without copies of the model under prefixes."""
    others = {name: tensor for name, tensor in named.state.items() if name not in own}
    copies = [prefix for prefix, count in _counts(others, own).items() if 2 * count > len(own)]
    beside = tuple(name for name in others if name.startswith(tuple(copies)))
    state = {name: tensor for name, tensor in named.state.items() if name not in beside}
    return Named(state=state, covered=named.covered, is_complete=True, beside=(*named.beside, *beside))


def without_wrappers(state: State) -> Named:
    """Return a state dict without the names of known wrappers, where all of its names begin with them."""
    theirs = _bare_names(state) or {name: name for name in state}
    names = [name for name in theirs if name != COUNTER]
    prefix = ""
    while names and (first := names[0].removeprefix(prefix).partition(".")[0]) in _OWNERS:
        if not all(name.startswith(f"{prefix}{first}.") for name in names):
            break
        prefix += f"{first}."
    return _behind(state, theirs, {}, prefix, 0)
