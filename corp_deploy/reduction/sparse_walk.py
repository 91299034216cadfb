"""Both models of a sparsification on their way through the same steps: without zeros, and as sparse by then.

Legend: B images of a piece, N tokens, C channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from calib.inputs import Inputs, InputSet, tensors_by_name, to_device
from corp_deploy.families import traced_model
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.steps import StreamState
from corp_deploy.traced.models.token_merging import Tokens

from .streams import CPU_TOKENS, embedded

State = Any  # a Walk between two steps, or what enters a traced model or a part of one, in order
Run = Callable[[State], object]


class _Reached(Exception):
    """Ends a run whose rest would compute nothing that is asked for."""


def inputs_and_outputs(run: Run, state: State, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """What enters and leaves a layer in a run, which ends there."""
    found: list[tuple[Tensor, Tensor]] = []

    def hear(_: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        found.append((inputs[0], y))
        raise _Reached

    handle = layer.register_forward_hook(hear)
    try:
        with suppress(_Reached):
            run(state)
    finally:
        handle.remove()
    return found[0]


def calls(run: Run, state: State, layers: Mapping[str, nn.Module]) -> tuple[list[str], State]:
    """Which of these layers a run calls, in order, and what it gives."""
    came: list[str] = []
    handles = [layer.register_forward_hook(lambda *_, name=name: came.append(name)) for name, layer in layers.items()]
    try:
        return came, run(state)
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
        """Of what enters a layer, None where all counts alike: in a traced model not all layers are of tokens."""
        tokens = self.sparse.tokens if isinstance(self.sparse, StreamState) else self.sparse[0]
        weights_BN = tokens.sizes if isinstance(tokens, Tokens) else self.weights_BN
        return None if weights_BN is None or x.shape[:-1] != weights_BN.shape else weights_BN


def pairs_of(
    model: nn.Module, inputs: InputSet, batch_size: int, weights: Callable[[Inputs], Tensor | None]
) -> Iterator[Pair]:
    """`weights` of tokens."""
    if isinstance(model, nn.Sequential):
        for batch in inputs.batches(batch_size):
            here = to_device(batch, device(model))
            entering = tuple(tensors_by_name(here).values())
            yield Pair(entering, entering, len(entering[0]), weights(here))
        return
    for x_BNC, weights_BN in embedded(model, inputs, batch_size):
        size = max(1, CPU_TOKENS // x_BNC.shape[1]) if x_BNC.device.type == "cpu" else len(x_BNC)
        pieces = x_BNC.split(size)
        present = [None] * len(pieces) if weights_BN is None else weights_BN.split(size)
        for piece_BNC, piece_BN in zip(pieces, present, strict=True):
            walk = StreamState.of(piece_BNC, piece_BN)
            yield Pair(walk, walk, len(piece_BNC))


def _onward(part: nn.Module, entering: tuple[Any, ...]) -> tuple[Any, ...]:
    """What enters the part behind this one."""
    return (part(*entering), *entering[1:])


def runs_of(model: nn.Module) -> list[Run]:
    """The steps of a model; of what was made of a traced one its parts."""
    if isinstance(model, nn.Sequential):
        return [partial(_onward, part) for part in model]
    return [lambda walk, step=step: walk.behind(step) for step in traced_model.steps(model)]  # type: ignore[misc]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPair:
    """The same step of both models."""

    reduced: Run
    sparse: Run


def advance_(pairs: Sequence[Pair], step: StepPair) -> None:
    for pair in pairs:
        pair.reduced, pair.sparse = step.reduced(pair.reduced), step.sparse(pair.sparse)
