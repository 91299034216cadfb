"""Both models of a sparsification on their way through the same steps: without zeros, and as sparse by then.

Legend: B images of a piece, N tokens, C channels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from calib.inputs import Inputs, InputSet, tensors_by_name, to_device
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.token_merging import Tokens

State = tuple[Any, ...]
"""What enters a part of a model, in order."""


class _Reached(Exception):
    """Ends a run whose rest would compute nothing that is asked for."""


def onward(part: nn.Module, entering: State) -> State:
    """What enters the part behind this one."""
    return (part(*entering), *entering[1:])


def inputs_and_outputs(part: nn.Module, state: State, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """What enters and leaves a layer in a run of a part, which ends there."""
    found: list[tuple[Tensor, Tensor]] = []

    def hear(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        found.append((inputs[0], y))
        raise _Reached

    handle = layer.register_forward_hook(hear)
    try:
        with suppress(_Reached):
            onward(part, state)
    finally:
        handle.remove()
    return found[0]


def calls(part: nn.Module, state: State, layers: Mapping[str, nn.Module]) -> tuple[list[str], State]:
    """Which of these layers a part calls, in order, and what enters the one behind it."""
    came: list[str] = []
    handles = [layer.register_forward_hook(lambda *_, name=name: came.append(name)) for name, layer in layers.items()]
    try:
        return came, onward(part, state)
    finally:
        for handle in handles:
            handle.remove()


@dataclass(slots=True)
class Pair:
    """The stream of a few inputs before a step, without zeros and as sparse by then."""

    reduced: State
    sparse: State
    inputs: int
    weights_BN: Tensor | None = None

    def weights(self, x: Tensor) -> Tensor | None:
        """Of what enters a layer, None where all counts alike: not all layers are of tokens."""
        tokens = self.sparse[0]
        weights_BN = tokens.sizes if isinstance(tokens, Tokens) else self.weights_BN
        return None if weights_BN is None or x.shape[:-1] != weights_BN.shape else weights_BN


def pairs_of(
    model: nn.Module, inputs: InputSet, batch_size: int, weights: Callable[[Inputs], Tensor | None]
) -> Iterator[Pair]:
    """`weights` of tokens."""
    for batch in inputs.batches(batch_size):
        here = to_device(batch, device(model))
        entering = tuple(tensors_by_name(here).values())
        yield Pair(entering, entering, len(entering[0]), weights(here))
