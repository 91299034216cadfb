"""Batches of a model's inputs, and sets of inputs that are identified by content and read in order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ground.errors import BadInput

from .draw import digest_of_contents, drawn_places
from .fingerprints import no_ids

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedInputs(Generic[InputsT_co]):
    """Inputs at `places` among the `available` ones; `ids` [count] hash contents, `digest` hashes names and contents.

    Up to `max_bad` unreadable inputs are skipped. `noun` is the plural that messages use.
    """

    noun: ClassVar[str]

    available: int
    places: tuple[int, ...] = ()
    ids: Tensor = field(default_factory=no_ids)
    digest: str = ""
    max_bad: int = 0

    def example(self) -> InputsT_co:
        raise NotImplementedError

    def _hashes(self, places: Sequence[int]) -> Sequence[bytes]:
        raise NotImplementedError

    def _loaded(self, span: range, batch_size: int, *, pin: bool) -> Iterator[ReadBatch[InputsT_co]]:
        raise NotImplementedError

    def _name(self, place: int) -> str:
        return str(place)

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def skipped(self) -> str:
        """Text about the files that a folder or shards hold beside images, with counts; empty without any."""
        return ""

    def name(self, position: int) -> str:
        return self._name(self.places[position])

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

    def _at(self, places: tuple[int, ...]) -> Self:
        hashes = self._hashes(places)
        digest = digest_of_contents(zip(map(self._name, places), hashes, strict=True))
        return replace(self, places=places, ids=ids_from_hashes(hashes), digest=digest)

    def subset(self, positions: Sequence[int]) -> Self:
        return self._at(tuple(self.places[position] for position in positions))

    def sampled(self, samples: int | None, seed: int, *, where: object) -> Self:
        return self._at(drawn_places(self.available, samples, seed, noun=self.noun, where=where))


InputSet = OpenedInputs[Inputs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    return inputs.subset(np.random.default_rng(seed).permutation(inputs.count).tolist())
