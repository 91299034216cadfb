"""The parts of a polish, one after the other: how far each may go, where its state is kept, who hears of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from calib.distributed import Ranks

from .descent import Fit, Position, StepBudget
from .gradient_averaging import tf32
from .matrices import Matrix
from .options import PolishOptions
from .report import PartReport
from .state import PolishState, StateFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a polish is, as a share, in which part, and the part's held-out error before and as it was last."""

    part: str
    share: float
    error_before: float
    error: float


class Parts:
    """Parts that are fitted in order; with a state file those that were finished before are not fitted again."""

    def __init__(
        self,
        options: PolishOptions,
        ranks: Ranks,
        file: StateFile | None,
        on_progress: Callable[[Progress], None] | None,
        where: torch.device,
    ) -> None:
        self.options, self.ranks, self.file, self.on_progress, self.where = options, ranks, file, on_progress, where
        self._reached = None if file is None else file.load(where)
        self.reports: list[PartReport] = [] if self._reached is None else list(self._reached.finished)
        self._left = {} if self._reached is None else dict(self._reached.matrices)
        self._begun = 0

    def pace(self, count: int) -> StepBudget:
        """Of the part at work, one of so many: an even share of the time that is left."""
        seconds = None
        if self.options.time_s is not None:
            spent = sum(report.seconds for report in self.reports)
            seconds = max(self.options.time_s - spent, 0.0) / (count - len(self.reports))
        return StepBudget(steps=self.options.most_steps, seconds=seconds)

    def was_finished_(self, matrices: Sequence[Matrix]) -> bool:
        """Whether the next part was finished by an attempt before; its matrices are then what that left."""
        self._begun += 1
        if self._begun > len(self.reports):
            return False
        for matrix in matrices:
            matrix.set_(self._left[matrix.name])
        return True

    def _save(self, position: Position) -> None:
        if self.file is not None and self.ranks.rank == 0:
            self.file.save(PolishState(position=position, finished=tuple(self.reports), matrices=self._left))

    def _hear(self, part: str, fit: Fit, position: Position, of: int) -> None:
        if self.on_progress is not None:
            last, first = position.curve[-1], position.curve[0]
            within = fit.pace.way(position.step, position.seconds)
            self.on_progress(
                Progress(
                    part=part,
                    share=(len(self.reports) + within) / of,
                    error_before=first.error,
                    error=min(last.error, last.averaged),
                )
            )

    def fit_(self, part: str, fit: Fit, *, of: int) -> None:
        """Carry one of so many parts out, on from where an attempt before it was, and report."""
        reached, self._reached = self._reached, None
        with tf32(self.where):
            position = fit.start() if reached is None else reached.position
            fit.run(position, self._save, lambda now: self._hear(part, fit, now, of))
        self.reports.append(position.report(part))
        self._left |= {matrix.name: matrix.values_OK for matrix in fit.matrices}
