"""Gradient steps on some matrices, judged on inputs held out: the best that was met stays, the start among it. In which
precision they are computed, and how averaged over processes and micro-batches (data parallel).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calib.distributed import Ranks
from calib.products import matmul_precision
from corp_deploy.traced.models.module import device

from .matrices import Matrix
from .options import PolishOptions
from .report import Judged, PartReport

_MEAN, _SQUARE = 0.9, 0.99  # the latter short, as a polish is
_LEAST = 1e-12
_NOISE_REL = 1e-4  # of a matrix's root mean square gradient: an entry below it moves less, as rounding's would else


class Draw(NamedTuple):
    """A row, and the number of its draw among all of them."""

    row: int
    number: int


def drawn(count: int, *, first: int, size: int, seed: int) -> list[Draw]:
    """Draws `first` to `first + size` of an endless sequence; each pass over all rows has an order of its own."""
    chosen: list[Draw] = []
    while len(chosen) < size:
        epoch, start = divmod(first + len(chosen), count)
        order = np.random.default_rng((seed, epoch)).permutation(count)[start:].tolist()
        number = first + len(chosen)
        chosen += [Draw(row, number + place) for place, row in enumerate(order[: size - len(chosen)])]
    return chosen


class Adam:
    """Adam (Kingma & Ba, arXiv 1412.6980) with a step relative to the root mean square of the matrix it changes, as
    Adafactor's (Shazeer & Stern, arXiv 1804.04235, section 8): one size serves layers whose weights, and LayerScale
    behind them, differ by many times. Norms, LayerScale and embeddings are left alone. What makes no difference, as the
    bias of keys, has a gradient of rounding alone, which must not grow to whole steps. Means change in place.
    """

    def __init__(self, matrices: Sequence[Matrix], means: Sequence[Tensor], squares: Sequence[Tensor]) -> None:
        self.matrices, self.means, self.squares = tuple(matrices), tuple(means), tuple(squares)

    @torch.no_grad()
    def step_(self, number: int, size: float) -> None:
        """The step of this number, from 1: entries change by about `size` times the scale of their matrix."""
        for matrix, mean_OK, square_OK in zip(self.matrices, self.means, self.squares, strict=True):
            gradient_OK = matrix.gradient_OK
            mean_OK.lerp_(gradient_OK, 1.0 - _MEAN)
            square_OK.lerp_(gradient_OK.square(), 1.0 - _SQUARE)
            root_OK = (square_OK / (1.0 - _SQUARE**number)).sqrt()
            root_OK.add_(_NOISE_REL * root_OK.square().mean().sqrt() + _LEAST)
            matrix.add_(mean_OK / root_OK * (-size * matrix.scale / (1.0 - _MEAN**number)))
            for parameter in matrix.parameters:
                parameter.grad = None


Piece = TypeVar("Piece")


def reduced_precision(where: torch.device) -> AbstractContextManager[Any]:
    """On a GPU products in bfloat16, with weights, gradients and errors in float32; on a CPU float32 throughout."""
    return torch.autocast("cuda", torch.bfloat16) if where.type == "cuda" else nullcontext()


def tf32(where: torch.device) -> AbstractContextManager[None]:
    """On a GPU the products that stay float32 by TF32, as long as the body lasts."""
    return matmul_precision("high") if where.type == "cuda" else nullcontext()


class GradientAverager:
    """A module whose parameters that require gradients get the mean of those of all processes (see torchrun)."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.module, self.where = module, device(module)
        self.shared = DistributedDataParallel(module) if ranks.size > 1 else None

    def __call__(self, *inputs: object) -> Tensor:
        out: Tensor = (self.shared or self.module)(*inputs)
        return out

    def backward(self, loss: Callable[[Piece], Tensor], pieces: Sequence[Piece]) -> None:
        """Add the gradients of `loss` over all pieces; the processes exchange theirs once, with the last piece."""
        for place, piece in enumerate(pieces, start=1):
            own = self.shared is not None and place < len(pieces)
            with self.shared.no_sync() if self.shared is not None and own else nullcontext(), torch.enable_grad():
                with reduced_precision(self.where):
                    value = loss(piece)
                value.backward()


_JUDGED = 12  # times on the way that the held-out error is looked at


class Problem(Protocol):
    """What is made smaller: an error over rows that are fitted to, and one over inputs held out."""

    @property
    def rows(self) -> int:
        """How many rows steps are drawn from."""
        ...

    def backward(self, draws: Sequence[Draw]) -> None:
        """Make the matrices' gradients those of the mean error over these rows and those of the other processes."""
        ...

    def held_out(self) -> float:
        """The error that is judged by, the same in every process."""
        ...


@dataclass(slots=True, kw_only=True)
class Position:
    """Where a fit is, all that it takes to go on with the same bits: the matrices with their gradients' means and
    squares and their average, the best that was met, and the errors so far.
    """

    values: list[Tensor]
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    best: list[Tensor]
    curve: tuple[Judged, ...]
    step: int = 0
    seconds: float = 0.0
    best_error: float

    @classmethod
    def first(cls, values: list[Tensor], error: float) -> "Position":
        """Nothing done yet."""
        curve = (Judged(step=0, seconds=0.0, error=error, averaged=error),)
        return cls(values=values, best=[value.clone() for value in values], curve=curve, best_error=error)

    def report(self, part: str) -> PartReport:
        """What came of it."""
        return PartReport(
            part=part,
            steps=self.step,
            seconds=self.seconds,
            error_before=self.curve[0].error,
            error=self.best_error,
            curve=self.curve,
        )


Hear = Callable[[Position], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """How far the way goes, in steps, in seconds, or in whichever is over first."""

    steps: int | None
    seconds: float | None

    def way(self, step: int, seconds: float) -> float:
        """The share of the way behind, in [0, 1]."""
        by_steps = 0.0 if self.steps is None else step / self.steps
        by_time = 0.0
        if self.seconds is not None:
            by_time = seconds / self.seconds if self.seconds > 0.0 else 1.0
        return min(1.0, max(by_steps, by_time))

    def since(self, before: float, began: float, ranks: Ranks) -> float:
        """Seconds since the start, of all attempts together; the first process's where time ends the fit."""
        own = before + time.monotonic() - began
        return own if self.seconds is None else ranks.all_gather(own)[0]


def step_size(options: PolishOptions, way: float) -> float:
    """Rising over the warm-up, then falling to nothing in a straight line."""
    if way < options.warm_up:
        return options.largest_step * (way + 0.1 * options.warm_up) / (1.1 * options.warm_up)
    return options.largest_step * (1.0 - way) / (1.0 - options.warm_up)


class Fit:
    """A part being fitted: the matrices that may change, and how far."""

    def __init__(self, matrices: Sequence[Matrix], pace: StepBudget, ranks: Ranks) -> None:
        self.matrices, self.pace, self.ranks = matrices, pace, ranks

    def start(self) -> Position:
        """Nothing done yet, judged once."""
        raise NotImplementedError

    def run(self, position: Position, save: Hear = lambda _: None, hear: Hear = lambda _: None) -> None:
        """Go on to the end of the way, and leave the matrices at the best that was met."""
        raise NotImplementedError

    def values(self) -> list[Tensor]:
        return [matrix.values_OK for matrix in self.matrices]

    def set_(self, values: Sequence[Tensor]) -> None:
        for matrix, value in zip(self.matrices, values, strict=True):
            matrix.set_(value)


class Descent(Fit):
    """Gradient steps on a problem."""

    def __init__(
        self, problem: Problem, matrices: Sequence[Matrix], options: PolishOptions, pace: StepBudget, ranks: Ranks
    ) -> None:
        super().__init__(matrices, pace, ranks)
        self.problem, self.options = problem, options

    def start(self) -> Position:
        position = Position.first(self.values(), self.problem.held_out())
        position.means, position.squares = ([torch.zeros_like(each) for each in position.values] for _ in range(2))
        position.average = self.values()
        return position

    def _judge_(self, position: Position) -> None:
        """The weights and their average; whichever is better than all before is kept."""
        position.values = self.values()
        errors: list[float] = []
        for candidate in (position.values, position.average):
            self.set_(candidate)
            errors.append(self.problem.held_out())
            if errors[-1] < position.best_error:
                position.best, position.best_error = [value.clone() for value in candidate], errors[-1]
        self.set_(position.values)
        error, averaged = errors
        position.curve += (Judged(step=position.step, seconds=position.seconds, error=error, averaged=averaged),)

    def run(self, position: Position, save: Hear = lambda _: None, hear: Hear = lambda _: None) -> None:
        count = self.options.batch_size * self.ranks.size
        adam = Adam(self.matrices, position.means, position.squares)
        self.set_(position.values)
        before, began = position.seconds, time.monotonic()
        way = self.pace.way(position.step, position.seconds)
        while way < 1.0:
            draws = drawn(self.problem.rows, first=position.step * count, size=count, seed=self.options.seed)
            self.problem.backward(draws[self.ranks.rank :: self.ranks.size])
            adam.step_(position.step + 1, step_size(self.options, way) * min(1.0, position.curve[0].error))
            position.step, position.seconds = position.step + 1, self.pace.since(before, began, self.ranks)
            now = self.pace.way(position.step, position.seconds)
            for average, value in zip(position.average, self.values(), strict=True):
                average.lerp_(value, 1.0 - 0.5 ** ((now - way) / self.options.averaged))
            due, way = int(now * _JUDGED) > int(way * _JUDGED), now
            if due:
                self._judge_(position)
                save(position)
            hear(position)
        self.set_(position.best)
