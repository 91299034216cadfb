"""What is polished, on what, and how; which inputs judge, and the error of a model's outputs on them.

Legend: B inputs, K blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calib.distributed import Ranks
from calib.inputs import InputSet
from ground.errors import BadInput

from .descent import Draw, reduced_precision
from .options import PolishOptions
from .teacher import Teacher

_MOST = 64  # inputs held out: a relative error of more of them is hardly surer, and every look costs a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSplit:
    """The inputs that are fitted to and those that judge."""

    fitted: InputSet
    held_out: InputSet


def _thinned(images: InputSet, rows: list[int]) -> InputSet:
    """Those at these positions, or so many of them as judge, evenly spaced."""
    chosen = rows if len(rows) <= _MOST else [rows[index * len(rows) // _MOST] for index in range(_MOST)]
    return images.subset(chosen)


def parted(
    images: InputSet, every: int, groups_B: Tensor | None = None, judges: InputSet | None = None
) -> ValidationSplit:
    """All fitted to where there are `judges`; else each `every`-th input held out, or all inputs of each `every`-th
    group in the order in which groups come up.

    Of more than 64 held out, 64 judge, evenly spaced, and the others are left aside. Copies of an input that judges are
    left aside too. Raises BadInput where nothing is left on a side.
    """
    if judges is not None:
        return ValidationSplit(fitted=images, held_out=_thinned(judges, list(range(judges.count))))
    groups_B = torch.arange(images.count) if groups_B is None else groups_B
    groups = list(dict.fromkeys(groups_B.tolist()))
    judging = set(groups[every - 1 :: every] or groups[-1:])  # the last one where there are fewer groups
    rows = [position for position, group in enumerate(groups_B.tolist()) if group in judging]
    fitted = (~torch.isin(images.ids, images.ids[rows])).nonzero().squeeze(1).tolist()
    if not rows or not fitted:
        raise BadInput(
            f"polish: {images.count} {images.noun} in {len(groups_B.unique())} different groups; expected two or more, "
            "because some are held out to judge by"
        )
    return ValidationSplit(fitted=images.subset(fitted), held_out=_thinned(images, rows))


def mean_over(own: Sequence[tuple[float, int]], ranks: Ranks) -> float:
    """The mean of (mean, count) pairs of every process, the same in all of them."""
    everyone = [pair for pairs in ranks.all_gather(list(own)) for pair in pairs]
    return sum(mean * count for mean, count in everyone) / sum(count for _, count in everyone)


class Judge:
    """The held-out error of a model: of its outputs, or of those and of the last stream, half and half in squares,
    where users read all of that stream's tokens.
    """

    def __init__(self, teacher: Teacher, *, reads_all: bool, piece: int, ranks: Ranks) -> None:
        self.teacher, self.reads_all, self.piece, self.ranks = teacher, reads_all, piece, ranks

    def of(self, errors: Tensor) -> Tensor:
        """What is judged of a student's squared errors [1 + K]."""
        return (errors[0] + errors[-1]) / 2.0 if self.reads_all else errors[0]

    @torch.no_grad()
    def errors(self, student: nn.Module) -> Tensor:
        """A student's squared errors [1 + K], float64, the same in every process."""
        own = range(len(self.teacher))[self.ranks.rank :: self.ranks.size]
        parts: list[tuple[list[float], int]] = []
        for start in range(0, len(own), self.piece):
            rows = own[start : start + self.piece]
            with reduced_precision(self.teacher.device):
                errors: Tensor = student(self.teacher.lesson([Draw(row, row) for row in rows]))
            parts.append((errors.tolist(), len(rows)))
        everyone = [part for of_rank in self.ranks.all_gather(parts) for part in of_rank]
        counts = torch.tensor([count for _, count in everyone], dtype=torch.float64)
        return counts / counts.sum() @ torch.tensor([each for each, _ in everyone], dtype=torch.float64)

    def error(self, student: nn.Module) -> float:
        """Relative, the same in every process."""
        return math.sqrt(float(self.of(self.errors(student))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A dense model and a reduced one that is changed in place, the inputs, and who judges.

    `read`: the tokens of the last stream that count, None for all.
    """

    dense: nn.Module
    model: nn.Module
    inputs: ValidationSplit
    options: PolishOptions
    judge: Judge
    ranks: Ranks
    read: Tensor | None
