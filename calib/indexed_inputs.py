"""Inputs as tensors by name that lie at hand, read in their order."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ground.errors import BadInput

from .input_set import Batch


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
