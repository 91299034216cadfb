"""The whole reduced model fitted to the dense model's outputs and streams."""

from collections.abc import Sequence

from torch import Tensor, nn

from calib.distributed import Ranks

from .descent import Descent
from .judge import Judge
from .matrices import chosen_
from .objective import Student
from .parts import Parts
from .subject import Subject
from .teacher import Teacher
from .together import Together


class WholeModel:
    """A problem of the descent: all matrices of a model at once, fitted to what is judged and the mean over the streams
    behind all blocks.
    """

    def __init__(self, model: nn.Module, teacher: Teacher, judge: Judge, *, piece: int, ranks: Ranks) -> None:
        """Parameters that are to change require gradients by now; `piece` inputs go forward and back at a time."""
        self.teacher, self.judge, self.piece = teacher, judge, piece
        self.student = Together(Student(model), ranks)

    @property
    def fitted(self) -> Sequence[int]:
        return range(len(self.teacher))

    def backward(self, rows: Sequence[int]) -> None:
        def loss(part: Sequence[int]) -> Tensor:
            errors = self.student(self.teacher.lesson(part))
            return (self.judge.of(errors) + errors[1:].mean()) * (len(part) / len(rows))

        self.student.backward(loss, [rows[start : start + self.piece] for start in range(0, len(rows), self.piece)])

    def held_out(self) -> float:
        return self.judge.error(self.student.module)


def polish_whole_(subject: Subject, parts: Parts) -> None:
    """All matrices of the reduced model, sites that were not reduced among them, as one part."""
    options, matrices = subject.options, chosen_(subject.model)
    teacher = Teacher(subject.dense, subject.inputs.fitted, mirrored=options.mirrored, cache_bytes=options.cache_bytes)
    problem = WholeModel(subject.model, teacher, subject.judge, piece=options.piece, ranks=subject.ranks)
    parts.fit_("model", Descent(problem, matrices, options, parts.pace(1), subject.ranks), of=1)
