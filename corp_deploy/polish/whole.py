"""The whole reduced model fitted to the dense model's outputs and streams."""

from collections.abc import Sequence

from torch import Tensor, nn

from calib.distributed import Ranks
from corp_deploy.families.family import family_of

from .descent import Descent
from .draws import Draw
from .judge import Judge
from .matrices import chosen_
from .objective import Student
from .parts import Parts
from .subject import Subject
from .teacher import AnyTeacher, Teacher, TeacherOfViews
from .together import Together

_LEAST = 1e-12


class WholeModel:
    """A problem of the descent: all matrices of a model at once, fitted to what is judged and the mean over the streams
    behind all blocks, each relative to what it is at first: where outputs err far less than streams they would be
    given up for these.
    """

    def __init__(self, model: nn.Module, teacher: AnyTeacher, judge: Judge, *, piece: int, ranks: Ranks) -> None:
        """Parameters that are to change require gradients by now; `piece` inputs go forward and back at a time."""
        self.teacher, self.judge, self.piece = teacher, judge, piece
        self.student = Together(Student(model), ranks)
        first = judge.errors(self.student.module)
        self.scales = tuple(max(float(each), _LEAST) for each in (judge.of(first), first[1:].mean()))

    @property
    def rows(self) -> int:
        return len(self.teacher)

    def backward(self, draws: Sequence[Draw]) -> None:
        def loss(part: Sequence[Draw]) -> Tensor:
            errors = self.student(self.teacher.lesson(part))
            judged, behind = self.scales
            return (self.judge.of(errors) / judged + errors[1:].mean() / behind) * (len(part) / len(draws))

        self.student.backward(loss, [draws[start : start + self.piece] for start in range(0, len(draws), self.piece)])

    def held_out(self) -> float:
        return self.judge.error(self.student.module)


def _teacher(subject: Subject) -> AnyTeacher:
    """Of views where there are any: texts have none."""
    dense, fitted, options = subject.dense, subject.inputs.fitted, subject.options
    if options.views and family_of(dense).input_spec(dense).medium == "images":
        return TeacherOfViews(dense, fitted, seed=options.seed, cache_bytes=options.cache_bytes)
    return Teacher(dense, fitted, cache_bytes=options.cache_bytes)


def polish_whole_(subject: Subject, parts: Parts) -> None:
    """All matrices of the reduced model, sites that were not reduced among them, as one part."""
    options, matrices = subject.options, chosen_(subject.model)
    teacher = _teacher(subject)
    problem = WholeModel(subject.model, teacher, subject.judge, piece=options.piece, ranks=subject.ranks)
    parts.fit_("model", Descent(problem, matrices, options, parts.pace(1), subject.ranks), of=1)
