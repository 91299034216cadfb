"""A reduced model fitted to the dense stream block by block, each from what the reduced stream has before it: all
matrices of a block at once by gradients, or layer after layer of it by least squares.

Legend: B inputs, M tokens of the dense stream, C channels.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from calib.distributed import Ranks
from corp_deploy.families.family import sites_of
from corp_deploy.spec.widths import is_empty
from corp_deploy.traced.models.module import device
from corp_deploy.traced.models.steps import SegmentStep, StreamState
from corp_deploy.traced.models.token_merging import Tokens

from .descent import Descent, Draw, GradientAverager, reduced_precision
from .matrices import chosen_
from .newton import AlternatingFit, Newton
from .parts import Parts
from .segments import segment_sublayer
from .subject import Subject, mean_over
from .teacher import stream_error
from .walk import Block, StreamPair, blocks, pairs_of, walk


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


def singles(pairs: Sequence[StreamPair]) -> list[StreamPair]:
    """A row an input, before the first block."""
    rows = list[StreamPair]()
    for x_BMC, weights_BM, _, is_held_out in pairs:
        for at in range(len(x_BMC)):
            x_1MC, weights_1M = x_BMC[at : at + 1], None if weights_BM is None else weights_BM[at : at + 1]
            rows.append(StreamPair(x_1MC, weights_1M, StreamState.of(x_1MC, weights_1M), is_held_out))
    return rows


class _Student(nn.Module):
    """The squared relative error behind one block."""

    def __init__(self, model: nn.Module, block: Block, read: Tensor | None) -> None:
        super().__init__()
        self.model, self.block, self.read = model, block, read

    def forward(self, both: StreamPair) -> Tensor:
        return stream_error(self.block(both.reduced).tokens, both.dense, read=self.read)


class OneBlock:
    """A problem of the descent: the matrices of one block. `read`: the tokens behind it that count, None for all.

    Rows have the dense stream behind the block, and the reduced one before it; those held out judge.
    """

    def __init__(
        self,
        model: nn.Module,
        block: Block,
        rows: Sequence[StreamPair],
        *,
        read: Tensor | None,
        piece: int,
        ranks: Ranks,
    ) -> None:
        self.fitted, self.judging = ([row for row in rows if row.held_out == which] for which in (False, True))
        self.piece, self.ranks, self.where = piece, ranks, device(model)
        self.student = GradientAverager(_Student(model, block, read), ranks)

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


def _changed_sites(dense: nn.Module, model: nn.Module) -> list[tuple[str, bool]]:
    """The sites that are narrower than the dense model's, and whether there is nothing left of each."""
    widths = {site.name: site.as_metadata() for site in sites_of(dense).every}
    narrower = (site for site in sites_of(model).every if widths.get(site.name) != site.as_metadata())
    return [(site.name, is_empty(site.width)) for site in narrower]


def polish_blocks_(subject: Subject, parts: Parts) -> None:
    """Each block that has a reduced site, in order, all its matrices at once."""
    model, options, every = subject.model, subject.options, blocks(subject.model)
    changed = [name for name, _ in _changed_sites(subject.dense, model)]
    reduced = {block.name for block in every if any(map(block.holds, changed))}

    def fit(block: Block, rows: Sequence[StreamPair]) -> None:
        matrices = chosen_(model, block) if block.name in reduced else ()
        if matrices and not parts.was_finished_(matrices):
            read = subject.read if block.name == every[-1].name else None
            problem = OneBlock(model, block, rows, read=read, piece=options.piece, ranks=subject.ranks)
            descent = Descent(problem, matrices, options, parts.pace(len(reduced)), subject.ranks)
            parts.fit_(block.name, descent, of=len(reduced))

    walk(subject.dense, model, singles(pairs_of(subject.dense, subject.inputs.fitted, subject.inputs.held_out)), fit)


def reduced_sites(dense: nn.Module, model: nn.Module) -> list[str]:
    """The sites that are narrower than the dense model's and have anything to fit."""
    return [name for name, is_gone in _changed_sites(dense, model) if not is_gone]


def fitted_steps(dense: nn.Module, model: nn.Module) -> dict[str, SegmentStep]:
    """By the names of the reduced model's blocks the segments that a narrower site stands in."""
    narrower = set(reduced_sites(dense, model))
    steps = {block.name: step for block in blocks(model) for step in block.steps if isinstance(step, SegmentStep)}
    return {name: step for name, step in steps.items() if not narrower.isdisjoint(step.sites)}


def polish_layers_(subject: Subject, parts: Parts) -> None:
    """Each reduced sublayer, in order, its layers in turn; a step is a sweep over all of them."""
    model, steps = subject.model, fitted_steps(subject.dense, subject.model)

    def fit(block: Block, pairs: Sequence[StreamPair]) -> None:
        if block.name in steps:
            sublayer = segment_sublayer(model, steps[block.name])
            sweeps = AlternatingFit(sublayer, pairs, Newton(), parts.pace(len(steps)), subject.ranks)
            if not parts.was_finished_(sweeps.matrices):
                parts.fit_(block.name, sweeps, of=len(steps))

    walk(subject.dense, model, pairs_of(subject.dense, subject.inputs.fitted, subject.inputs.held_out), fit)
