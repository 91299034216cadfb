"""Polish: (dense model, reduced model, images) -> the reduced model nearer to the dense one."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from calib.calibrate import ALONE
from calib.distributed import Ranks
from calib.inputs import InputSet
from calib.sites import evaluating
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.read_tokens import Reads, tokens_to_fit
from corp_deploy.store.input_sets import model_digest
from corp_deploy.traced.models.module import device, replaced
from corp_deploy.traced.models.sites import TracedStream
from corp_deploy.traced.models.steps import SegmentStep
from ground.errors import BadInput

from .blocks import polish_blocks_, polish_layers_, reduced_sites
from .descent import Descent, Draw, GradientAverager
from .matrices import chosen_
from .options import PolishName, PolishOptions
from .parts import Parts, Progress, StateFile
from .report import PolishReport
from .segments import in_rows
from .subject import Judge, Subject, parted
from .teacher import AnyTeacher, AugmentedTeacher, Student, Teacher
from .walk import blocks

_LEAST = 1e-12


class WholeModel:
    """A problem of the descent: all matrices of a model at once, fitted to what is judged and the mean over the streams
    behind all blocks, each relative to what it is at first: where outputs err far less than streams they would be
    given up for these.
    """

    def __init__(self, model: nn.Module, teacher: AnyTeacher, judge: Judge, *, piece: int, ranks: Ranks) -> None:
        """Parameters that are to change require gradients by now; `piece` inputs go forward and back at a time."""
        self.teacher, self.judge, self.piece = teacher, judge, piece
        self.student = GradientAverager(Student(model), ranks)
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


def polish_whole_(subject: Subject, parts: Parts) -> None:
    """All matrices of the reduced model, sites that were not reduced among them, as one part."""
    options, matrices, dense, fitted = subject.options, chosen_(subject.model), subject.dense, subject.inputs.fitted
    if options.views and traced_model.input_spec(dense).medium == "images":  # texts have no views
        teacher: AnyTeacher = AugmentedTeacher(dense, fitted, seed=options.seed, cache_bytes=options.cache_bytes)
    else:
        teacher = Teacher(dense, fitted, cache_bytes=options.cache_bytes)
    problem = WholeModel(subject.model, teacher, subject.judge, piece=options.piece, ranks=subject.ranks)
    parts.fit_("model", Descent(problem, matrices, options, parts.pace(1), subject.ranks), of=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """A reduced model that was polished, or as it was where nothing was better, and the report."""

    model: nn.Module
    report: PolishReport


_POLISH: dict[PolishName, Callable[[Subject, Parts], None]] = {
    "layer": polish_layers_,
    "block": polish_blocks_,
    "model": polish_whole_,
}


def _state_file(path: Path, subject: Subject) -> StateFile:
    run = {
        "dense model": model_digest(subject.dense),
        "reduced model": model_digest(subject.model),
        "fitted inputs": subject.inputs.fitted.digest,
        "held-out inputs": subject.inputs.held_out.digest,
        "options": repr(sorted(asdict(subject.options).items())),
        "processes": str(subject.ranks.size),
    }
    return StateFile(path=path, run=run)


def _refuse(dense: nn.Module, reduced: nn.Module, options: PolishOptions) -> None:
    """Raise BadInput where streams have fewer channels than the dense model's, to which none can be fitted; where a
    site to be fitted stands in no segment, and where the segments are others than the dense model's; where a layer's
    step would have to be solved through convolutions of several places.
    """
    every = (sites_of(model).every for model in (dense, reduced))
    widths, of_reduced = ({site.name: site.width for site in own if isinstance(site, TracedStream)} for own in every)
    if thinner := [name for name, width in of_reduced.items() if widths.get(name) != width]:
        raise BadInput(
            f"polish: the streams that {', '.join(thinner[:4])} write have fewer channels than the dense model's, to "
            "which they would be fitted; leave --polish or --residual away"
        )
    narrower = reduced_sites(dense, reduced)
    walked = {name for step in traced_model.steps(reduced) if isinstance(step, SegmentStep) for name in step.sites}
    opaque = [name for name in narrower if name not in walked]
    if opaque and options.how != "model":
        raise BadInput(
            f"polish {options.how}: {', '.join(opaque[:4])} stand in blocks that can't be taken apart; polish model, "
            "or leave --polish out"
        )
    own, dense_own = ([block.name for block in blocks(model)] for model in (reduced, dense))
    if own != dense_own:
        raise BadInput(
            f"polish: the reduced model's blocks are {', '.join(own)}, the dense one's {', '.join(dense_own)}, so that "
            "none can be fitted to another; leave --polish out"
        )
    if unsolved := in_rows(reduced, narrower) if options.how == "layer" else []:
        raise BadInput(
            f"polish layer: {', '.join(unsolved[:4])} have convolutions of several places, through which no step is "
            "solved; polish block or model"
        )


def polished(
    dense: nn.Module,
    reduced: nn.Module,
    images: InputSet,
    options: PolishOptions,
    *,
    groups_B: Tensor | None = None,
    judges: InputSet | None = None,
    reads: Reads | None = None,
    state: Path | None = None,
    ranks: Ranks = ALONE,
    on_progress: Callable[[Progress], None] | None = None,
) -> Polished:
    """The reduced model fitted to the dense one, without labels; neither of those given is changed.

    `judges`, other images, tell when it is best; without them some of these are held out, or all of some groups
    (`groups_B` int64 [images]). The model that errs least on them is given back, the one that was given among those.
    `reads`: the tokens that count, see tokens_to_fit. With `state` an interrupted polish of a number of steps goes on
    from that file and gives the same bits as one that was not interrupted; the file stays until it is removed. In
    several processes each takes `batch_size` of a step's inputs, and all get the same model. All runs where the models
    are. Raises BadInput for too few images and for the state of another polish.
    """
    _refuse(dense, reduced, options)
    inputs = parted(images, options.held_out_every, groups_B, judges)
    # What a merged token should be is told by the tokens that it stands for.
    dense = dense if traced_model.merging_of(dense) is None else traced_model.with_merging(dense, None)
    read = tokens_to_fit(reduced, reads)
    with torch.inference_mode(False), torch.no_grad(), evaluating(dense):
        model = replaced(reduced, {}).eval()
        kept = Teacher(dense, inputs.held_out, cache_bytes=options.cache_bytes)
        judge = Judge(kept, reads_all=read is None, piece=options.piece, ranks=ranks)
        subject = Subject(dense=dense, model=model, inputs=inputs, options=options, judge=judge, ranks=ranks, read=read)
        before = judge.error(Student(model))
        file = None if state is None else _state_file(state, subject)
        parts = Parts(options, ranks, file, on_progress, device(model))
        _POLISH[options.how](subject, parts)
        after = judge.error(Student(model))
    report = PolishReport(
        how=options.how,
        fitted=inputs.fitted.count,
        held_out=inputs.held_out.count,
        batch_size=options.batch_size * ranks.size,
        seed=options.seed,
        error_before=before,
        error=min(before, after),
        parts=tuple(parts.reports),
    )
    best = model if after < before else replaced(reduced, {})
    return Polished(model=best.eval().requires_grad_(False), report=report)
