"""A walk through the blocks of two models side by side, with the residual streams behind each block.

Legend: B inputs, N tokens, M tokens of the dense stream, C channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from calib.inputs import Inputs, InputSet, to_device
from corp_deploy.families import traced_model
from corp_deploy.families.traced_model import outputs_of_walk
from corp_deploy.reduction.streams import mean_of_sources
from corp_deploy.traced.models.module import device_of
from corp_deploy.traced.models.steps import SegmentStep, Step, StreamState
from corp_deploy.traced.models.token_merging import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSteps:
    """The steps of one block, by its name; a block that can't be split is one step."""

    name: str
    steps: tuple[Step, ...]

    def __call__(self, walk: StreamState) -> StreamState:
        for step in self.steps:
            walk = walk.behind(step)
        return walk


def blocks(model: nn.Module) -> tuple[BlockSteps, ...]:
    """Group the model's steps by block; a step that is no segment belongs to the block before it."""
    groups: list[tuple[str, list[Step]]] = [("", [])]
    for step in traced_model.steps(model):
        if isinstance(step, SegmentStep) and step.name != groups[-1][0]:
            groups.append((step.name, []))
        groups[-1][1].append(step)
    return tuple(BlockSteps(name=name, steps=tuple(steps)) for name, steps in groups if steps)


def last_stream(model: nn.Module, x_BNC: Tensor, weights_BN: Tensor | None) -> Tokens:
    """Return the residual stream behind the last block, for a stream that enters the first."""
    state = StreamState.of(x_BNC, weights_BN)
    for block in blocks(model):
        state = block(state)
    return state.tokens


def joined_outputs(model: nn.Module, last: Tokens, inputs: Inputs) -> Tensor:
    """Return the output that reads the last stream [B,...], or that stream if none does.

    Several outputs are joined to [B,F], each over the root of its number of tokens, so that they count alike.
    """
    outputs = outputs_of_walk(model, StreamState(tokens=last), inputs) or (last.x,)
    if len(outputs) == 1:
        return outputs[0]
    rows = [output.reshape(len(output), 1, -1) if output.dim() < 3 else output for output in outputs]
    tokens = [row[0].numel() // row.shape[-1] for row in rows]
    return torch.cat([row.flatten(1) / count**0.5 for row, count in zip(rows, tokens, strict=True)], dim=1)


AT_ONCE = 8  # inputs of a forward pass: fixed, because rounding depends on a batch's shape


class StreamPair(NamedTuple):
    """The dense and the reduced stream of some inputs.

    `dense` [B,M,C] is never merged; `weights` [B,M] of its tokens are 1, or 0 for padding (None: no padding). Pairs
    that are `held_out` judge the fit to the others.
    """

    dense: Tensor
    weights: Tensor | None
    reduced: StreamState
    held_out: bool = False

    @property
    def target(self) -> Tensor:
        """The wanted reduced stream, in which a token is the mean of the dense tokens that were merged into it."""
        x_BNC, _, sources_BM = self.reduced.tokens
        return self.dense if sources_BM is None else mean_of_sources(self.dense, sources_BM, x_BNC.shape[1])


def stream_pairs(dense: nn.Module, fitted: InputSet, held_out: InputSet) -> list[StreamPair]:
    """Return pairs of the streams before the first block, equal in both models, for all inputs.

    Memory: up to 2 * inputs * M * C * 4 bytes.
    """
    pairs = list[StreamPair]()
    for inputs, is_held_out in ((fitted, False), (held_out, True)):
        for batch in inputs.batches(AT_ONCE):
            here = to_device(batch, device_of(dense))
            x_BMC, weights_BM = traced_model.first_stream(dense, here), traced_model.token_weights(dense, here)
            pairs.append(StreamPair(x_BMC, weights_BM, StreamState.of(x_BMC, weights_BM), is_held_out))
    return pairs


Fit = Callable[[BlockSteps, Sequence[StreamPair]], None]


def walk(dense: nn.Module, model: nn.Module, pairs: list[StreamPair], fit: Fit) -> None:
    """Replace the streams of `pairs`, block by block, by those behind the block, and `fit` each block of `model`.

    `fit` gets the dense stream behind the block and the reduced one before it.
    """
    for before, block in zip(blocks(dense), blocks(model), strict=True):
        for at, pair in enumerate(pairs):
            pairs[at] = pair._replace(dense=before(StreamState.of(pair.dense, pair.weights)).tokens.x)
        fit(block, pairs)
        for at, pair in enumerate(pairs):
            pairs[at] = pair._replace(reduced=block(pair.reduced))
