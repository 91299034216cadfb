"""Polish: (dense model, reduced model, images) -> the reduced model closer to the dense one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calib.inputs import InputSet
from calib.products import matmul_precision
from calib.sites import evaluating
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.reduction.read_tokens import Reads, counts_all, find_read_places
from corp_deploy.store.input_sets import model_digest
from corp_deploy.traced.models.module import device_of, replace_submodules, tracing
from corp_deploy.traced.models.sites import TracedStream
from corp_deploy.traced.models.steps import SegmentStep

from .held_out import ValidationSplit, held_out_error, split_inputs
from .newton import PartReport, SweepBudget, fit_sublayer_
from .options import PolishOptions
from .segments import segment_sublayer, spatial_sites
from .state import PolishState, StateFile
from .walk import BlockSteps, StreamPair, blocks, stream_pairs, walk

HELD_OUT_EVERY = 8
"""One of this many inputs, or groups of inputs, is held out to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishReport:
    """The result of a polish: its sublayers, and the held-out relative error of the outputs before and after."""

    fitted: int
    held_out: int
    error_before: float
    error: float
    parts: tuple[PartReport, ...]

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    @property
    def line(self) -> str:
        seconds = sum(part.seconds for part in self.parts)
        return (
            f"polished in {len(self.parts)} layers by least squares, without labels: {self.steps} sweeps in "
            f"{seconds:.0f} s, outputs' error on {self.held_out} inputs held out "
            f"{self.error_before:.4f} -> {self.error:.4f}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishProgress:
    """The share of a polish that is done, the current sublayer, and its held-out error before and now."""

    part: str
    share: float
    error_before: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """A polished model, or the unpolished one where the polish gained nothing, and the report."""

    model: nn.Module
    report: PolishReport


def reduced_sites(dense: nn.Module, model: nn.Module) -> list[str]:
    """Return the names of `model`'s sites that are narrower than the dense model's and not empty."""
    widths = {site.name: site.as_metadata() for site in sites_of(dense).every}
    narrower = (site for site in sites_of(model).every if widths.get(site.name) != site.as_metadata())
    return [site.name for site in narrower if site.width > 0]


def fitted_steps(dense: nn.Module, model: nn.Module) -> dict[str, SegmentStep]:
    """Return, by block name, the segments of `model` that contain a site narrower than the dense model's."""
    narrower = set(reduced_sites(dense, model))
    steps = {block.name: step for block in blocks(model) for step in block.steps if isinstance(step, SegmentStep)}
    return {name: step for name, step in steps.items() if not narrower.isdisjoint(step.sites)}


def reason_against(dense: nn.Module, reduced: nn.Module) -> str | None:
    """Return why a reduced model can't be polished, None where it can.

    The reasons are streams with fewer channels than the dense model's, reduced sites outside of all segments, other
    segments than the dense model's, and convolutions with kernels larger than 1x1, which have no Gauss-Newton step.
    """
    every = (sites_of(model).every for model in (dense, reduced))
    widths, of_reduced = ({site.name: site.width for site in own if isinstance(site, TracedStream)} for own in every)
    if thinner := [name for name, width in of_reduced.items() if widths.get(name) != width]:
        return (
            f"the streams that {', '.join(thinner[:4])} write have fewer channels than the dense model's, so that "
            "they can't be fitted to those; leave out --polish or --residual"
        )
    narrower = reduced_sites(dense, reduced)
    walked = {name for step in traced_model.steps(reduced) if isinstance(step, SegmentStep) for name in step.sites}
    if opaque := [name for name in narrower if name not in walked]:
        return f"{', '.join(opaque[:4])} stand in blocks that can't be taken apart; leave --polish out"
    own, dense_own = ([block.name for block in blocks(model)] for model in (reduced, dense))
    if own != dense_own:
        return (
            f"the reduced model's blocks are {', '.join(own)}, the dense one's {', '.join(dense_own)}, so that "
            "none can be fitted to another; leave --polish out"
        )
    if spatial := spatial_sites(reduced, narrower):
        return (
            f"{', '.join(spatial[:4])} have convolutions with kernels larger than 1x1, which polish can't fit; leave "
            "--polish out"
        )
    return None


def _budget(options: PolishOptions, finished: Sequence[PartReport], count: int) -> SweepBudget:
    """Return the budget of the next sublayer of `count`: all allowed sweeps, and an even share of the time left."""
    if options.time_s is None:
        return SweepBudget(sweeps=options.most_steps, seconds=None)
    left_s = max(options.time_s - sum(report.seconds for report in finished), 0.0)
    return SweepBudget(sweeps=options.most_steps, seconds=left_s / (count - len(finished)))


def _fit_layers_(
    dense: nn.Module,
    model: nn.Module,
    inputs: ValidationSplit,
    options: PolishOptions,
    file: StateFile | None,
    on_progress: Callable[[PolishProgress], None] | None,
) -> tuple[PartReport, ...]:
    """Fit each reduced sublayer in place, in order, or load it if `file` has it; return the report of each."""
    state, steps = PolishState() if file is None else file.load(device_of(model)), fitted_steps(dense, model)
    reports = list[PartReport]()

    def fit(block: BlockSteps, pairs: Sequence[StreamPair]) -> None:
        if block.name not in steps:
            return
        sublayer = segment_sublayer(model, steps[block.name])
        if block.name in state.finished:
            for matrix in sublayer.matrices:
                matrix.set_(state.matrices[matrix.name])
            reports.append(state.finished[block.name])
            return
        budget = _budget(options, reports, len(steps))

        def show(now: PartReport) -> None:
            if on_progress is not None:
                share = (len(reports) + budget.spent(now.steps, now.seconds)) / len(steps)
                on_progress(PolishProgress(part=now.part, share=share, error_before=now.error_before, error=now.error))

        reports.append(fit_sublayer_(sublayer, pairs, budget, on_sweep=show))
        state.finished[block.name] = reports[-1]
        state.matrices |= {matrix.name: matrix.values_OD for matrix in sublayer.matrices}
        if file is not None:
            file.save(state)

    walk(dense, model, stream_pairs(dense, inputs.fitted, inputs.held_out), fit)
    return tuple(reports)


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
    on_progress: Callable[[PolishProgress], None] | None = None,
) -> Polished:
    """Return a copy of the reduced model, its sublayers fitted to the dense stream without labels, and a report.

    `judges`, other images, choose the steps; without them some of these images are held out, or all of some groups
    (`groups_B` int64 [images]). The model that errs least on them is returned, which may be the unpolished one.
    `reads`: the tokens that count, see counts_all. With the file `state` an interrupted polish continues behind the
    last finished sublayer; if sweeps are limited and time isn't, the result has the same bits as without the
    interruption. The caller removes the file. See reason_against for models that can't be polished.

    Raises:
        BadInput: too few images, or the state of another polish.
    """
    inputs = split_inputs(images, HELD_OUT_EVERY, groups_B, judges)
    # The target of a merged token comes from the tokens that were merged into it.
    dense = dense if traced_model.merging_of(dense) is None else traced_model.with_merging(dense, None)
    reads_all = counts_all(reduced, reads) or not find_read_places(tracing(reduced), device_of(reduced))
    with torch.inference_mode(False), torch.no_grad(), evaluating(dense):
        model = replace_submodules(reduced, {}).eval()
        where = device_of(model)
        before = held_out_error(dense, model, inputs.held_out, reads_all=reads_all)
        file = None
        if state is not None:
            run = {
                "dense model": model_digest(dense),
                "reduced model": model_digest(model),
                "fitted inputs": inputs.fitted.digest,
                "held-out inputs": inputs.held_out.digest,
                "options": repr(sorted(asdict(options).items())),
            }
            file = StateFile(path=state, run=run)
        with matmul_precision("high") if where.type == "cuda" else nullcontext():
            parts = _fit_layers_(dense, model, inputs, options, file, on_progress)
        after = held_out_error(dense, model, inputs.held_out, reads_all=reads_all)
    report = PolishReport(
        fitted=inputs.fitted.count,
        held_out=inputs.held_out.count,
        error_before=before,
        error=min(before, after),
        parts=parts,
    )
    best = model if after < before else replace_submodules(reduced, {})
    return Polished(model=best.eval().requires_grad_(False), report=report)
