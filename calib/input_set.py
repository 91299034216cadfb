"""What a calibration runs over: inputs that are counted, identified by content, and read in order."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ground.errors import BadInput

from .inputs import Inputs

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
