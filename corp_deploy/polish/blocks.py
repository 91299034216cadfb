"""A reduced block fitted to the dense stream behind it, from what the reduced stream has before it.

Legend: B inputs, M tokens of the dense stream, C channels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from calib.distributed import Ranks
from calib.inputs import InputSet
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.streams import embedded
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.steps import StreamState
from corp_deploy.traced.models.token_merging import Tokens

from .descent import Descent, Draw
from .gradient_averaging import GradientAverager, reduced_precision
from .held_out import mean_over
from .matrices import chosen_
from .objective import stream_error
from .parts import Parts
from .subject import Subject
from .walk import blocks

_AT_ONCE = 8  # inputs of a forward pass, always the same: rounding is that of a pass's form


class StreamPair(NamedTuple):
    """The dense stream [B,M,C] of some inputs, which is never merged, with the weights of its tokens [B,M] (None: all
    alike), and the reduced one on its way.
    """

    dense: Tensor
    weights: Tensor | None
    reduced: StreamState


def joined(rows: Sequence[StreamPair]) -> StreamPair:
    """Several as one."""
    walks = [row.reduced for row in rows]
    tokens = (_together([walk.tokens[part] for walk in walks]) for part in range(3))
    beside = _together([walk.beside_BNX for walk in walks])
    return StreamPair(
        torch.cat([row.dense for row in rows]),
        _together([row.weights for row in rows]),
        StreamState(tokens=Tokens(*tokens), beside_BNX=beside),  # type: ignore[arg-type]
    )


def _together(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def first_streams(dense: nn.Module, inputs: InputSet) -> list[StreamPair]:
    """A row an input, before the first block. Memory: up to 2 * inputs * M * C * 4 bytes."""
    rows: list[StreamPair] = []
    for x_BMC, weights_BM in embedded(dense, inputs, _AT_ONCE):
        for at in range(len(x_BMC)):
            x_1MC = x_BMC[at : at + 1]
            weights_1M = None if weights_BM is None else weights_BM[at : at + 1]
            rows.append(StreamPair(x_1MC, weights_1M, StreamState.of(x_1MC, weights_1M)))
    return rows


class _Student(nn.Module):
    """The squared relative error behind one block."""

    def __init__(self, model: nn.Module, index: int, read: Tensor | None) -> None:
        super().__init__()
        self.model, self.index, self.read = model, index, read

    def forward(self, both: StreamPair) -> Tensor:
        mine = blocks(self.model)[self.index](both.reduced)
        return stream_error(mine.tokens, both.dense, read=self.read)


class OneBlock:
    """A problem of the descent: the matrices of one block. `read`: the tokens behind it that count, None for all.

    Rows have the dense stream behind the block, and the reduced one before it.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        rows: Sequence[StreamPair],
        judging: Sequence[StreamPair],
        *,
        read: Tensor | None,
        piece: int,
        ranks: Ranks,
    ) -> None:
        self.fitted, self.judging, self.piece, self.ranks, self.where = rows, judging, piece, ranks, device(model)
        self.student = GradientAverager(_Student(model, index, read), ranks)

    @property
    def rows(self) -> int:
        return len(self.fitted)

    def _pieces(self, rows: Sequence[StreamPair]) -> list[StreamPair]:
        return [joined(rows[start : start + self.piece]) for start in range(0, len(rows), self.piece)]

    def backward(self, draws: Sequence[Draw]) -> None:
        def loss(both: StreamPair) -> Tensor:
            error: Tensor = self.student(both)
            return error * (len(both.dense) / len(draws))

        self.student.backward(loss, self._pieces([self.fitted[draw.row] for draw in draws]))

    @torch.no_grad()
    def held_out(self) -> float:
        errors: list[tuple[float, int]] = []
        for both in self._pieces(self.judging[self.ranks.rank :: self.ranks.size]):
            with reduced_precision(self.where):
                errors.append((float(self.student.module(both)), len(both.dense)))
        return math.sqrt(mean_over(errors, self.ranks))


def _reduced(subject: Subject) -> list[bool]:
    """Of each block whether a site in it is narrower than the dense model's."""
    models = subject.dense, subject.model
    widths = [{site.name: site.as_metadata() for site in sites_of(model).every} for model in models]
    changed = [name for name, width in widths[1].items() if widths[0].get(name) != width]
    return [any(map(block.holds, changed)) for block in blocks(subject.model)]


def polish_blocks_(subject: Subject, parts: Parts) -> None:
    """Each block that has a reduced site, in order, all its matrices at once."""
    model, options = subject.model, subject.options
    inputs = (subject.inputs.fitted, subject.inputs.held_out)
    fitted, judging = (first_streams(subject.dense, each) for each in inputs)
    reduced = _reduced(subject)
    for index, (before, block) in enumerate(zip(blocks(subject.dense), blocks(model), strict=True)):
        fitted, judging = (
            [row._replace(dense=before(StreamState.of(row.dense, row.weights)).tokens.x) for row in rows]
            for rows in (fitted, judging)
        )
        matrices = chosen_(model, block) if reduced[index] else ()
        if matrices and not parts.was_finished_(matrices):
            read = subject.read if index == len(reduced) - 1 else None
            problem = OneBlock(model, index, fitted, judging, read=read, piece=options.piece, ranks=subject.ranks)
            descent = Descent(problem, matrices, options, parts.pace(sum(reduced)), subject.ranks)
            parts.fit_(block.name, descent, of=sum(reduced))
        fitted, judging = ([row._replace(reduced=block(row.reduced)) for row in rows] for rows in (fitted, judging))
