"""Names of a state dict brought to a model's: as they are, or without what stands before all of them in the file."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from .weight_file import LONGEST_NAME, State, first_names

# Modules around a model or a part of it: DistributedDataParallel, torch.compile, FSDP, activation checkpoints.
_AROUND = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Attributes under which Lightning modules and other wrappers keep a model whose names are another project's.
_OWNERS = ("model", "timm_model", "net", "network", "backbone", "encoder", "student", "teacher")
_COUNT = "num_batches_tracked"
SIMILAR = 0.8  # of the most names that any way covers, so that one lacking a head is still taken into account
COUNTER = "n_averaged"  # of torch's AveragedModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Named:
    """A state dict under a model's names. `prefix`: what stood before them; `covered`: how many of the model's names
    are there, all of them if `is_complete`; `beside`: names of what is no part of the model; `renamed`: pairs of a
    model's name and the file's.
    """

    state: State
    prefix: str = ""
    covered: int = 0
    is_complete: bool = False
    beside: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a user should know of it."""
        first = ", ".join(f"{old} as {new}" for new, old in self.renamed[:1])
        notes = (f"renamed {len(self.renamed)} tensors, {first}",) if self.renamed else ()
        if not self.beside:
            return notes
        return (*notes, f"left out what stands beside the model: {first_names(sorted(self.beside))}")


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _AROUND)


def _bare_names(names: Collection[str]) -> dict[str, str] | None:
    """Return names by what is left of them without modules around parts; None where two become one."""
    bare = {_bare(name): name for name in names}
    return bare if len(bare) == len(names) else None


def clashing(names: Collection[str]) -> list[str]:
    """Return the names that are there with and without a module around them."""
    return sorted(name for name in names if (bare := _bare(name)) != name and bare in names)


def _counts(names: Collection[str], own: Collection[str]) -> Counter[str]:
    """Return how many of a model's names are there behind each prefix."""
    counts: Counter[str] = Counter()
    longest = max(map(len, own), default=0) + 2 * LONGEST_NAME  # a name of many dots would take for ever
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
    """Return what stands behind a prefix; `theirs` and `own`: the file's and the model's names by their bare ones."""
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
    """Return the ways to name a state dict as a model's: by its own names, then behind each fitting prefix."""
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
    is_one = len({name.partition(".")[0] for name in ours}) == 1  # a module around the network that was saved
    if is_one and all(name.partition(".")[2] in theirs for name in ours if not name.endswith(_COUNT)):
        return [_behind(state, theirs, inner, "", len(needed))]
    return [without_wrappers(state)]


def _without_copies(named: Named, own: Collection[str]) -> Named:
    """Return the model under its own names, without other copies of it behind prefixes."""
    others = {name: tensor for name, tensor in named.state.items() if name not in own}
    copies = [prefix for prefix, count in _counts(others, own).items() if 2 * count > len(own)]
    beside = tuple(name for name in others if name.startswith(tuple(copies)))
    state = {name: tensor for name, tensor in named.state.items() if name not in beside}
    return Named(state=state, covered=named.covered, is_complete=True, beside=(*named.beside, *beside))


def without_wrappers(state: State) -> Named:
    """Return a state dict without what is known to stand around models, where all of its names begin with it."""
    theirs = _bare_names(state) or {name: name for name in state}
    names = [name for name in theirs if name != COUNTER]
    prefix = ""
    while names and (first := names[0].removeprefix(prefix).partition(".")[0]) in _OWNERS:
        if not all(name.startswith(f"{prefix}{first}.") for name in names):
            break
        prefix += f"{first}."
    return _behind(state, theirs, {}, prefix, 0)
