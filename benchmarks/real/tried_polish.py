"""Ways to polish that were tried on the real encoder, each for as many steps on crops of the same photographs.

    make real
    corp-deploy reduce ... --macs 0.8 --effort standard -o reduced/
    python -m benchmarks.real.tried_polish --reduced reduced/ --output benchmarks/results/tried.json --threads 1

All matrices at once (as built), or updates of them of low rank, or biases alone; block by block fitted to the dense
stream (as built), from the reduced stream or from random means of both. Photographs of every eighth group judge when to
stop; errors are of the class token and of patch tokens, on crops of other photographs.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.real.bench import Bench, with_bench
from benchmarks.real.measures import normed, relative_error
from benchmarks.real.tried import KIND
from calib.calibrate import ALONE
from calib.groups import group_ids
from calib.inputs import InputSet
from corp_deploy.polish.blocks import OneBlock, singles
from corp_deploy.polish.descent import Descent, StepBudget
from corp_deploy.polish.matrices import Matrix, chosen_
from corp_deploy.polish.options import STEP_SIZES, PolishName, PolishOptions
from corp_deploy.polish.polish import WholeModel
from corp_deploy.polish.subject import Judge, Subject, parted
from corp_deploy.polish.teacher import AugmentedTeacher, Student, Teacher
from corp_deploy.polish.walk import Block, StreamPair, pairs_of, walk
from corp_deploy.reduction.read_tokens import tokens_to_fit
from corp_deploy.store.checkpoint import load_checkpoint
from corp_deploy.store.inputs import images_for_model
from corp_deploy.traced.models.module import replaced
from corp_deploy.traced.models.steps import StreamState
from corp_deploy.traced.models.token_merging import Tokens

KEY = ("way", "steps")
EVERY = 3  # of the crops that judge
CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """W0 + A B of one layer: A [O,R] from 0, B [R,K] random of orthogonal rows; `is_left` says which of both this is.
    A step of either changes W by about as much as one of Matrix does.
    """

    matrix: Matrix
    dense_OK: Tensor
    left_OR: Tensor
    right_RK: Tensor
    is_left: bool

    @classmethod
    def both(cls, matrix: Matrix, rank: int) -> "tuple[LowRank, LowRank]":
        dense_OK = matrix.values_OK
        rank = min(rank, *dense_OK.shape)
        right_RK = torch.linalg.qr(torch.randn(dense_OK.shape[1], rank).to(dense_OK))[0].T.contiguous()
        left_OR = dense_OK.new_zeros(len(dense_OK), rank)
        left = cls(matrix=matrix, dense_OK=dense_OK, left_OR=left_OR, right_RK=right_RK, is_left=True)
        return left, replace(left, is_left=False)

    @property
    def name(self) -> str:
        return f"{self.matrix.name} {'left' if self.is_left else 'right'}"

    @property
    def own(self) -> Tensor:
        return self.left_OR if self.is_left else self.right_RK

    @property
    def scale(self) -> float:
        rank, width = self.right_RK.shape
        return self.matrix.scale * math.sqrt(width / rank) if self.is_left else math.sqrt(1.0 / width)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Both sides read the gradient, so the second one clears it."""
        return () if self.is_left else self.matrix.parameters

    @property
    def values_OK(self) -> Tensor:
        return self.own.clone()

    @property
    def gradient_OK(self) -> Tensor:
        gradient_OK = self.matrix.gradient_OK
        return gradient_OK @ self.right_RK.T if self.is_left else self.left_OR.T @ gradient_OK

    def set_(self, values: Tensor) -> None:
        self.own.copy_(values)
        self.matrix.set_(self.dense_OK + self.left_OR @ self.right_RK)

    def add_(self, change: Tensor) -> None:
        self.set_(self.own + change)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The bias alone; `scale`: of the weight, as Matrix has it."""

    matrix: Matrix
    name: str = ""
    parameters: tuple[Tensor, ...] = field(default=())

    @property
    def scale(self) -> float:
        return self.matrix.scale

    @property
    def values_OK(self) -> Tensor:
        return self.matrix.values_OK

    @property
    def gradient_OK(self) -> Tensor:
        gradient_OK = self.matrix.gradient_OK
        gradient_OK[:, :-1] = 0.0
        for parameter in self.matrix.parameters:
            parameter.grad = None
        return gradient_OK

    def set_(self, values_OK: Tensor) -> None:
        self.matrix.set_(values_OK)

    def add_(self, change_OK: Tensor) -> None:
        self.matrix.add_(change_OK)


def low_rank(rank: int, matrices: Sequence[Matrix]) -> list[Any]:
    torch.manual_seed(0)
    return [side for matrix in matrices for side in LowRank.both(matrix, rank)]


def biases(matrices: Sequence[Matrix]) -> list[Any]:
    return [Bias(matrix=matrix, name=matrix.name) for matrix in matrices if matrix.layer.bias is not None]


def whole_(subject: Subject, chosen: Callable[[Sequence[Matrix]], list[Any]]) -> None:
    """As polish_whole_ does, with other numbers to fit."""
    options = subject.options
    teacher = AugmentedTeacher(subject.dense, subject.inputs.fitted, seed=0, cache_bytes=CACHE_BYTES)
    matrices = chosen(chosen_(subject.model))
    problem = WholeModel(subject.model, teacher, subject.judge, piece=options.piece, ranks=ALONE)
    _descend_(problem, matrices, options)


def _descend_(problem: Any, matrices: list[Any], options: PolishOptions) -> None:
    descent = Descent(problem, matrices, options, StepBudget(steps=options.most_steps, seconds=None), ALONE)
    descent.run(descent.start())


def _between(row: StreamPair, dense_BMC: Tensor, share: Tensor) -> StreamPair:
    x = torch.lerp(row.reduced.tokens.x, dense_BMC, share)
    return row._replace(reduced=StreamState(tokens=Tokens(x, *row.reduced.tokens[1:])))


def by_block_(subject: Subject, *, mixes: bool) -> None:
    """As polish_blocks_ does; `mixes`: from random means of the dense and the reduced stream, judged on the latter."""
    options, model = subject.options, subject.model
    entering = list[Tensor]()
    torch.manual_seed(0)

    def fit(block: Block, pairs: Sequence[StreamPair]) -> None:
        rows, before = pairs, entering[:]
        entering[:] = [row.dense for row in pairs]
        if mixes:
            rows = [
                row if row.held_out else _between(row, dense, torch.rand(()))
                for row, dense in zip(pairs, before, strict=True)
            ]
        if matrices := list(chosen_(model, block)):
            _descend_(OneBlock(model, block, rows, read=None, piece=options.piece, ranks=ALONE), matrices, options)

    pairs = singles(pairs_of(subject.dense, subject.inputs.fitted, subject.inputs.held_out))
    entering += [row.dense for row in pairs]
    with torch.no_grad():
        walk(subject.dense, model, pairs, fit)


WAYS: dict[str, tuple[PolishName, Callable[[Subject], None]]] = {
    "all matrices": ("model", partial(whole_, chosen=list)),
    "updates of rank 8": ("model", partial(whole_, chosen=partial(low_rank, 8))),
    "updates of rank 32": ("model", partial(whole_, chosen=partial(low_rank, 32))),
    "biases alone": ("model", partial(whole_, chosen=biases)),
    "block by block": ("block", partial(by_block_, mixes=False)),
    "block by block from both streams": ("block", partial(by_block_, mixes=True)),
}


def polished(dense: nn.Module, reduced: nn.Module, inputs: Any, way: str, steps: int) -> tuple[nn.Module, float, float]:
    """The model, and the errors by which it was judged, before and after."""
    how, polish_ = WAYS[way]
    options = PolishOptions(how=how, steps=steps, cache_bytes=CACHE_BYTES, step_size=STEP_SIZES[how])
    read = tokens_to_fit(reduced, None)
    with torch.inference_mode(False), torch.no_grad():
        model = replaced(reduced, {}).eval()
        teacher = Teacher(dense, inputs.held_out, cache_bytes=CACHE_BYTES)
        judge = Judge(teacher, reads_all=read is None, piece=options.piece, ranks=ALONE)
        before = judge.error(Student(model))
        polish_(Subject(dense=dense, model=model, inputs=inputs, options=options, judge=judge, ranks=ALONE, read=read))
        after = judge.error(Student(model))
    return model.requires_grad_(False), before, after


def _tokens(model: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat(list(normed(model, images.split(16))))


def errors_of(model: nn.Module, dense_BNC: Tensor, images: Tensor) -> dict[str, float]:
    tokens_BNC = _tokens(model, images)
    return {
        "held_out_class_error": relative_error(tokens_BNC[:, 0], dense_BNC[:, 0]),
        "held_out_patch_error": relative_error(tokens_BNC[:, 1:], dense_BNC[:, 1:]),
    }


@click.command(help=__doc__)
@click.option("--reduced", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--steps", type=click.IntRange(1), default=48, show_default=True)
@click.option("--ways", default="", help="Default: all of them.")
@with_bench
def main(bench: Bench, *, reduced: Path, steps: int, ways: str) -> None:
    record, dense, student = bench.record(KIND), bench.subject.model, load_checkpoint(reduced).model
    images: InputSet = images_for_model(dense, bench.calibration.path)
    inputs = parted(images, PolishOptions().held_out_every, group_ids(images, str(bench.calibration.groups)))
    inputs = replace(inputs, held_out=inputs.held_out.subset(range(0, inputs.held_out.count, EVERY)))
    held = bench.subject.held_out
    dense_BNC = _tokens(dense, held)
    record.put("polishes", {"way": "none", "steps": 0, **errors_of(student, dense_BNC, held)}, KEY)
    for way in ways.split(",") if ways else WAYS:
        if not bench.again and record.has("polishes", {"way": way, "steps": steps}):
            continue
        started = time.process_time()
        model, before, after = polished(dense, student, inputs, way, steps)
        cpu_s = time.process_time() - started
        row = {"way": way, "steps": steps, "judged_before": before, "judged": after, "cpu_s": cpu_s}
        record.put("polishes", row | errors_of(model, dense_BNC, held), KEY)
        click.echo(f"{way}: {record['polishes'][-1]}")


if __name__ == "__main__":
    main()
