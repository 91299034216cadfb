"""Batches of a model's inputs, and sets of inputs that are identified by content and read in order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .draw import digest_of_contents, drawn_places

NAMED = 5
Inputs = Tensor | Mapping[str, Tensor]


def tensors_by_name(inputs: Inputs) -> Mapping[str, Tensor]:
    return {"input": inputs} if isinstance(inputs, Tensor) else inputs


def map_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(inputs, Tensor):
        return change(inputs)
    return {name: change(tensor) for name, tensor in inputs.items()}


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    return model(*tensors_by_name(inputs).values())


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def to_device(inputs: Inputs, device: torch.device | str) -> Inputs:
    return map_tensors(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def input_count(inputs: Inputs) -> int:
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors_by_name(inputs).items()}
    if len(set(sizes.values())) != 1 or not all(sizes.values()):
        shapes = ", ".join(_describe(name, tensor) for name, tensor in tensors_by_name(inputs).items()) or "no tensor"
        raise BadInput(f"inputs: got {shapes}; expected the same batch of 1 or more in front of every input")
    return next(iter(sizes.values()))


def refuse_dtypes(inputs: Inputs) -> None:
    for name, tensor in tensors_by_name(inputs).items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise BadInput(f"inputs: got {_describe(name, tensor)}; expected float32, whole numbers or booleans")


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([tensors_by_name(part)["input"] for part in parts])
    return {name: torch.cat([tensors_by_name(part)[name] for part in parts]) for name in first}


def chunks(inputs: Inputs, size: int) -> Iterator[Inputs]:
    for start in range(0, input_count(inputs), size):
        yield map_tensors(inputs, lambda tensor, start=start: tensor[start : start + size])  # type: ignore[misc]


def padded_to(inputs: Inputs, size: int) -> Inputs:
    repeats = size - input_count(inputs)
    if not repeats:
        return inputs
    return map_tensors(inputs, lambda tensor: torch.cat([tensor, tensor[-1:].expand(repeats, *tensor.shape[1:])]))


def _describe(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype} {list(tensor.shape)}"


InputsT_co = TypeVar("InputsT_co", bound=Tensor | Mapping[str, Tensor], covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadBatch(Generic[InputsT_co]):
    """Inputs [B,...] with content hashes [B], errors of unreadable ones (`bad`), and the next batch's position."""

    inputs: InputsT_co
    ids: Tensor
    bad: tuple[str, ...]
    end: int


def ids_from_hashes(hashes: Iterable[bytes]) -> Tensor:
    ids = np.frombuffer(b"".join(content[:8] for content in hashes), dtype="<i8")
    return torch.from_numpy(ids.astype(np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedInputs(Generic[InputsT_co]):
    """Inputs at `places` among the `available` ones. Their contents are hashed on first use of `ids` or `digest`.

    Up to `max_bad` unreadable inputs are skipped. `noun` is the plural that messages use. `known` has the SHA-256 of
    contents by place; sets of parts share it.
    """

    noun: ClassVar[str]

    available: int
    places: tuple[int, ...] = ()
    max_bad: int = 0
    known: dict[int, bytes] = field(default_factory=dict)

    def example(self) -> InputsT_co:
        raise NotImplementedError

    def _hashes(self, places: Sequence[int]) -> Sequence[bytes]:
        raise NotImplementedError

    def _loaded(self, span: range, batch_size: int, *, pin: bool) -> Iterator[ReadBatch[InputsT_co]]:
        raise NotImplementedError

    def name_of_place(self, place: int) -> str:
        return str(place)

    @property
    def count(self) -> int:
        return len(self.places)

    @cached_property
    def _contents_sha256(self) -> list[bytes]:
        unknown = [place for place in self.places if place not in self.known]
        self.known.update(zip(unknown, self._hashes(unknown) if unknown else (), strict=True))
        return [self.known[place] for place in self.places]

    @cached_property
    def ids(self) -> Tensor:
        """The first 64 bits of each content's SHA-256, int64 [count]."""
        return ids_from_hashes(self._contents_sha256)

    @cached_property
    def digest(self) -> str:
        """One SHA-256 of all names and contents, in order."""
        return digest_of_contents(zip(map(self.name_of_place, self.places), self._contents_sha256, strict=True))

    @property
    def skipped(self) -> str:
        """Text about the files that a folder or shards hold beside images, with counts; empty without any."""
        return ""

    def name(self, position: int) -> str:
        return self.name_of_place(self.places[position])

    def batches(self, batch_size: int) -> Iterator[InputsT_co]:
        return (batch.inputs for batch in self.read(batch_size) if len(batch.ids))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[ReadBatch[InputsT_co]]:
        """Yield batches of positions `first` to `stop`. `bad`: errors of earlier inputs; `pin`: page-locked memory."""
        if batch_size < 1:
            raise BadInput(f"batch size: got {batch_size}, expected at least 1")
        met = list(bad)
        for batch in self._loaded(range(first, self.count if stop is None else stop), batch_size, pin=pin):
            met.extend(batch.bad)
            self.refuse_bad(met)
            yield batch

    def refuse_bad(self, bad: Sequence[str]) -> None:
        if len(bad) > self.max_bad:
            more = f"\nand {len(bad) - NAMED} more" if len(bad) > NAMED else ""
            reasons = "\n".join(bad[:NAMED]) + more
            allowed = f"; at most {self.max_bad} bad {self.noun} are allowed (--max-bad)" if len(bad) > 1 else ""
            raise BadInput(f"{reasons}{allowed}")

    @property
    def reads_once(self) -> bool:
        """True for batches of an iterator, which can't be read again."""
        return False

    @property
    def is_identified(self) -> bool:
        """True if the places are known, so that parts can be chosen."""
        return True

    def identified(self) -> Self:
        """Return the set with its places known. Raises BadInput for batches that can be read only once."""
        return self

    def head(self, count: int) -> "OpenedInputs[InputsT_co]":
        """Return the first `count` inputs, which can be read before all others are."""
        return self.subset(range(min(self.count, count)))

    def subset(self, positions: Sequence[int]) -> Self:
        return replace(self, places=tuple(self.places[position] for position in positions))

    def sampled(self, samples: int | None, seed: int, *, where: object) -> Self:
        return replace(self, places=drawn_places(self.available, samples, seed, noun=self.noun, where=where))


InputSet = OpenedInputs[Inputs]


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexedInputs(OpenedInputs[Mapping[str, Tensor]]):
    """Inputs whose tensors can be read at any positions."""

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def _loaded(self, span: range, batch_size: int, *, pin: bool) -> Iterator[ReadBatch[Mapping[str, Tensor]]]:
        for begin in span[::batch_size]:
            end = min(begin + batch_size, span.stop)
            inputs = self._rows(range(begin, end))
            if pin:
                inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            yield ReadBatch(inputs=inputs, ids=self.ids[begin:end], bad=(), end=end)


SomeSet = TypeVar("SomeSet", bound=InputSet)


def split_by_mask(inputs: SomeSet, second_B: Tensor) -> tuple[SomeSet, SomeSet]:
    first, second = ((second_B == side).nonzero().squeeze(1).tolist() for side in (False, True))
    return inputs.subset(first), inputs.subset(second)


def held_out_split(inputs: SomeSet, count: int, *, seed: int) -> tuple[SomeSet, SomeSet]:
    """Return the inputs that stay, and `count` different ones drawn by `seed`, held out with their copies.

    Raises BadInput unless both sides have an input.
    """
    distinct = inputs.ids.unique()
    if not 1 <= count < len(distinct):
        got = f"hold out: got {count} of {inputs.count} {inputs.noun}"
        if len(distinct) == inputs.count:
            raise BadInput(f"{got}, expected at least 1 and fewer than all")
        if len(distinct) == 1:
            raise BadInput(f"{got}, which are all copies of one: none can be held out; give different {inputs.noun}")
        raise BadInput(
            f"{got}, which are copies of {len(distinct)} different ones, and copies stay on one side: expected 1 to "
            f"{len(distinct) - 1}; remove the copies, or give more different {inputs.noun}"
        )
    chosen = np.random.default_rng(seed).choice(len(distinct), count, replace=False)
    return split_by_mask(inputs, torch.isin(inputs.ids, distinct[torch.from_numpy(chosen)]))


def shuffle_inputs(inputs: SomeSet, *, seed: int) -> SomeSet:
    inputs = inputs.identified()
    return inputs.subset(np.random.default_rng(seed).permutation(inputs.count).tolist())
