"""What a model is run on, one tensor or several named ones with the batch in front; and what a calibration runs over:
inputs that are counted, identified by content, and read in order.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ground.errors import BadInput

Inputs = Tensor | Mapping[str, Tensor]


def tensors_by_name(inputs: Inputs) -> Mapping[str, Tensor]:
    """The tensors by name; one that has none goes as `input`."""
    return {"input": inputs} if isinstance(inputs, Tensor) else inputs


def map_tensors(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same form with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    return {name: change(tensor) for name, tensor in inputs.items()}


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """What the model gives: named inputs are handed over by their order."""
    return model(*tensors_by_name(inputs).values())


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """What a model gave: one output bare, or several."""
    return (output,) if isinstance(output, Tensor) else tuple(output)


def to_device(inputs: Inputs, device: torch.device | str) -> Inputs:
    """On that device; out of page-locked memory without waiting."""
    return map_tensors(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def batch_size(inputs: Inputs) -> int:
    """How many inputs there are. Raises BadInput for none and where the tensors disagree."""
    sizes = {name: len(tensor) if tensor.ndim else 0 for name, tensor in tensors_by_name(inputs).items()}
    if len(set(sizes.values())) != 1 or not all(sizes.values()):
        shapes = ", ".join(_shown(name, tensor) for name, tensor in tensors_by_name(inputs).items()) or "no tensor"
        raise BadInput(f"inputs: got {shapes}; expected the same batch of 1 or more in front of every input")
    return next(iter(sizes.values()))


def refuse_dtypes(inputs: Inputs) -> None:
    """Raises BadInput for numbers of another precision than the model's: float32 and whole numbers are taken."""
    for name, tensor in tensors_by_name(inputs).items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            raise BadInput(f"inputs: got {_shown(name, tensor)}; expected float32, whole numbers or booleans")


def concatenated(parts: Sequence[Inputs]) -> Inputs:
    """Parts of one form as one batch."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([tensors_by_name(part)["input"] for part in parts])
    return {name: torch.cat([tensors_by_name(part)[name] for part in parts]) for name in first}


def chunks(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """In parts of `size`; the last one may be smaller."""
    for start in range(0, batch_size(inputs), size):
        yield map_tensors(inputs, lambda tensor, start=start: tensor[start : start + size])  # type: ignore[misc]


def padded_to(inputs: Inputs, size: int) -> Inputs:
    """Made up to `size` with repeats of the last one."""
    repeats = size - batch_size(inputs)
    if not repeats:
        return inputs
    return map_tensors(inputs, lambda tensor: torch.cat([tensor, tensor[-1:].expand(repeats, *tensor.shape[1:])]))


def _shown(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype} {list(tensor.shape)}"


InputsT_co = TypeVar("InputsT_co", bound=Tensor | Mapping[str, Tensor], covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Generic[InputsT_co]):
    """inputs [B,...], their content hashes [B]; `end` is the position after the last one, bad ones included.

    Where all were bad, `ids` is empty and `inputs` says nothing.
    """

    inputs: InputsT_co
    ids: Tensor
    bad: tuple[str, ...]
    end: int


class InputSet(Protocol):
    """`ids` [count] int64 are hashes of each one's content, `digest` covers names and contents; `noun`: its plural."""

    noun: ClassVar[str]

    @property
    def count(self) -> int: ...

    @property
    def ids(self) -> Tensor: ...

    @property
    def digest(self) -> str: ...

    @property
    def available(self) -> int:
        """How many there are where these were drawn from."""
        ...

    @property
    def places(self) -> Sequence[int]:
        """Where each of these stands among those."""
        ...

    def name(self, position: int) -> str: ...

    def example(self) -> Inputs:
        """One input of the shape and dtype of all, to learn from what a model makes of it."""
        ...

    def batches(self, batch_size: int) -> Iterator[Inputs]:
        """All in order; the last batch may be smaller."""
        ...

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[Batch[Inputs]]:
        """Positions `first` to `stop` with what identifies them; `bad` are the ones met before `first`.

        `pin` puts them into page-locked memory, from which a copy to a GPU doesn't wait.
        """
        ...

    def refuse_bad(self, bad: Sequence[str]) -> None:
        """Raises BadInput with the reasons of the first ones when `bad` are more than allowed."""
        ...

    def subset(self, positions: Sequence[int]) -> Self:
        """Those at these positions alone."""
        ...


SomeSet = TypeVar("SomeSet", bound=InputSet)


def held_out_split(inputs: SomeSet, count: int, *, seed: int) -> tuple[SomeSet, SomeSet]:
    """`count` of the inputs drawn by `seed` to be held out, and first the rest; each in the order they had.

    Copies of an input go where it goes, beyond the count, so that no content is in both. Raises BadInput unless both
    have an input.
    """
    distinct = inputs.ids.unique()
    if not 1 <= count < len(distinct):
        copies = f" ({len(distinct)} different ones)" if len(distinct) < inputs.count else ""
        raise BadInput(
            f"hold out: got {count} of {inputs.count} {inputs.noun}{copies}, expected at least 1 and fewer than all"
        )
    chosen = np.random.default_rng(seed).choice(len(distinct), count, replace=False)
    is_held = torch.isin(inputs.ids, distinct[torch.from_numpy(chosen)])
    rest, held_out = ((is_held == side).nonzero().squeeze(1).tolist() for side in (False, True))
    return inputs.subset(rest), inputs.subset(held_out)


def sampled_positions(count: int, samples: int | None, seed: int, *, where: str, noun: str) -> tuple[int, ...]:
    """`samples` of `count` positions drawn by `seed`, sorted, or all. Raises BadInput for more than there are."""
    if samples is None:
        return tuple(range(count))
    if not 1 <= samples <= count:
        raise BadInput(
            f"{where}: got {count} {noun}, but {samples} samples were asked for; ask for 1 to {count} or all"
        )
    return tuple(sorted(np.random.default_rng(seed).choice(count, samples, replace=False).tolist()))


def shuffled(inputs: SomeSet, *, seed: int) -> SomeSet:
    """The same inputs in an order drawn by `seed`, so that the first ones are a draw of their own."""
    return inputs.subset(np.random.default_rng(seed).permutation(inputs.count).tolist())


def ids_and_digest(names: Iterable[str], hashes: Sequence[bytes]) -> tuple[Tensor, str]:
    """What identifies inputs by the SHA-256 of each one's content: ids [count] int64, and one digest of them all."""
    digest = hashlib.sha256()
    for name, content in zip(names, hashes, strict=True):
        digest.update(name.encode() + b"\0" + content)
    ids = np.frombuffer(b"".join(content[:8] for content in hashes), dtype="<i8")
    return torch.from_numpy(ids.astype(np.int64)), digest.hexdigest()


class IndexedInputs:
    """What has `ids` [count] and gives the tensors of any positions."""

    __slots__ = ()

    ids: Tensor

    @property
    def count(self) -> int:
        raise NotImplementedError

    def _rows(self, positions: Sequence[int]) -> Mapping[str, Tensor]:
        """Those at some positions, by name."""
        raise NotImplementedError

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Tensor]]:
        """All in order; the last batch may be smaller."""
        return (batch.inputs for batch in self.read(batch_size))

    def read(
        self, batch_size: int, *, first: int = 0, stop: int | None = None, bad: Sequence[str] = (), pin: bool = False
    ) -> Iterator[Batch[Mapping[str, Tensor]]]:
        """Positions `first` to `stop`, `pin`ned where they are copied to a GPU next."""
        if batch_size < 1:
            raise BadInput(f"batch size: got {batch_size}, expected at least 1")
        self.refuse_bad(bad)
        last = self.count if stop is None else stop
        for begin in range(first, last, batch_size):
            end = min(begin + batch_size, last)
            inputs = self._rows(range(begin, end))
            if pin:
                inputs = {name: tensor.pin_memory() for name, tensor in inputs.items()}
            yield Batch(inputs=inputs, ids=self.ids[begin:end], bad=(), end=end)

    def refuse_bad(self, bad: Sequence[str]) -> None:
        """Raises BadInput for any: what can't be read is met on opening."""
        if bad:
            raise BadInput("\n".join(bad))
