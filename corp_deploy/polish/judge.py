"""The held-out error of a model that is polished.

Legend: K blocks.
"""

import math

import torch
from torch import Tensor, nn

from calib.distributed import Ranks

from .descent import Draw
from .gradient_averaging import reduced_precision
from .teacher import Teacher


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
