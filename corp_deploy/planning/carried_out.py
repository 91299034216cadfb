"""Plans carried out: in one pass over the moments, in the closed loop over the images, or by the better of both.

Images to which neither is fitted decide which is better. The file also polishes a reduction.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from calib.inputs import InputSet, input_count
from calib.moments import Moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.polish.options import PolishOptions
from corp_deploy.polish.polish import PolishProgress, polished, reason_against
from corp_deploy.reduction.closed_loop import reduce_traced
from corp_deploy.reduction.loop import Loop
from corp_deploy.reduction.model import Reduction, reduce, uniform_widths
from corp_deploy.reduction.order import shared_reader
from corp_deploy.reduction.overfitting import data_gap
from corp_deploy.reduction.read_tokens import Reads
from corp_deploy.store.checkpoint import Checkpoint
from ground.effort import Stopwatch, measure_effort
from ground.errors import BadInput

from .curves import compute_site_metrics
from .judging import JudgeChoice
from .probe import Probe
from .probe_split import ProbeSplit, draw_inputs, set_apart
from .request import Attempt, ReductionRequest, WidthPlan


def carry_out(
    dense: nn.Module,
    planned: WidthPlan,
    *,
    moments: Moments,
    request: ReductionRequest | None = None,
    images: InputSet | None,
    held_out: Moments | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> Reduction:
    """Reduce by a plan: in the closed loop over the images if the request asks for it, otherwise in one pass.

    If calibration recorded groups of images, the reduction has an estimate of its sites' error on images that they are
    not fitted to. `watch` records the times of selection and recovery, or of a loop, which does both.
    """
    if request is not None and request.options.loop is not None:
        assert images is not None
        with measure_effort(watch, "closed loop"):
            reduction = reduce_traced(
                dense,
                images,
                planned.method,
                widths=planned.widths,
                loop=request.loop(moments),
                metrics=planned.metrics,
                on_progress=on_progress,
            )
    else:
        with measure_effort(watch, "recover"):
            reduction = reduce(
                dense,
                replace(moments, metrics=planned.metrics),
                planned.method,
                widths=planned.widths,
                eliminations=planned.eliminations,
                held_out=held_out,
                images=images,
                on_progress=on_progress,
                watch=watch,
            )
    gap = data_gap(reduction.sites, moments)
    if gap is None:
        return reduction
    return replace(reduction, gap=gap, decisions=(*reduction.decisions, gap.sentence("at these widths, sites lose")))


MOST_APART = 0.1
"""Largest share of images set apart at which a loop fitted to the other images isn't fitted again to all."""


def _output_error(dense: nn.Module, reduced: nn.Module, planned: WidthPlan, apart: ProbeSplit) -> float:
    """Return the relative output error on the images set apart, against the dense model without token merging."""
    probe = Probe(
        model=dense if traced_model.merging_of(dense) is None else traced_model.with_merging(dense, None),
        moments=apart.moments,
        method=planned.method,
        inputs=apart.inputs,
        eliminations={},
    )
    return math.sqrt(probe.effect_of(reduced))


def _count_judges(apart: ProbeSplit, images: InputSet) -> int:
    """Return the number of images set apart, or 0 if there are none or the fit has, or may have, seen some of them."""
    set_apart_ids = images.ids[~torch.isin(images.ids, apart.others.ids)]
    fitted_ids = apart.moments.image_ids
    unseen = len(fitted_ids) and not torch.isin(set_apart_ids, fitted_ids).any()
    return input_count(apart.inputs) if len(set_apart_ids) and unseen else 0


def carry_out_better(
    planning: Callable[[ReductionRequest], tuple[Checkpoint, WidthPlan]],
    moments: Moments,
    request: ReductionRequest,
    images: InputSet,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> tuple[Reduction, WidthPlan]:
    """Carry a plan out in one pass and in the closed loop, and return the reduction of less error with its plan.

    Both attempts are fitted without the images set apart, which judge them; the choice of the plan's widths did use
    these images. If no images can be set apart, or a layer that the model calls again reads a reduced site, there is
    only the one pass. The winner is fitted to all images again, unless it is a loop that was fitted to nearly all of
    them. With effort `thorough`, if the loop wins, the budget's widths are planned again by trials in closed loops.
    `planning` returns the model with the token merging that a request's plan chose, and the plan.
    """
    effort, options = request.options.effort, request.options
    # The same request in the closed loop, with nothing left to choose.
    polish = None if options.polish_options is None else options.polishing
    looped = replace(request, options=replace(options, effort="quick", closed_loop="asymmetric", polish=polish))
    reduced = partial(carry_out, on_progress=on_progress, watch=watch)
    dense, planned = planning(request)
    apart = set_apart(dense, moments, images)
    if planned.widths is None:
        shown = draw_inputs(dense, apart.loop_images)
        planned = replace(planned, metrics=compute_site_metrics(dense.model, planned.method, shown))
    count = _count_judges(apart, images)
    widths = uniform_widths(dense.model, planned.method) if planned.widths is None else planned.widths
    reason = shared_reader(traced_model.tracing(dense.model), sites_of(dense.model), widths)
    if not count or apart.others.count < Loop().held_out_every:
        reason = f"of {images.count} {images.noun} none can be set apart to judge"
    if reason is not None:
        note = f"effort {effort}: {reason}, so one pass over the moments"
        planned = replace(planned, decisions=(*planned.decisions, note))
        return reduced(dense.model, planned, moments=moments, request=request, images=images), planned

    def tried(name: str, request: ReductionRequest) -> tuple[Attempt, Reduction]:
        started = time.perf_counter()
        known = replace(planned, eliminations=None)  # the plan's are those of the moments of all images
        found = reduced(dense.model, known, moments=apart.moments, request=request, images=apart.others)
        seconds = time.perf_counter() - started
        return Attempt(name=name, error=_output_error(dense.model, found.model, planned, apart), seconds=seconds), found

    one, _ = tried("one pass over the moments", request)
    loop, reduction = tried("the closed loop", looped)
    kept, request = (loop, looped) if loop.error < one.error else (one, request)
    again = kept is loop and effort == "thorough" and request.options.share is not None
    if again:
        dense, planned = planning(request)
    words = (
        f"effort {effort}, judged on {count} {images.noun} that no repair was fitted to: {one.describe()}, "
        f"{loop.describe()}; {kept.name} is kept{', its widths tried in loops' * again}"
    )
    stages = tuple(replace(each, kept=each is kept) for each in (one, loop))
    planned = replace(planned, stages=stages, decisions=(*planned.decisions, words))
    if kept is not loop or again or images.count - apart.others.count > MOST_APART * images.count:
        reduction = reduced(dense.model, planned, moments=moments, request=request, images=images)
    return reduction, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Polishing:
    """The file from which a stopped polish continues, and the callback that receives its progress."""

    state: Path | None = None
    on_progress: Callable[[PolishProgress], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishInputs:
    """The inputs of a polish.

    `reduced_on` are the inputs that the reduction before it may use, `fitted` those that the polish is fitted to, with
    their groups [B] if known. `judges` are inputs that neither uses; if None, the polish holds out some of `fitted`.
    """

    reduced_on: InputSet
    fitted: InputSet
    groups_B: Tensor | None
    judges: InputSet | None


def _groups(images: InputSet, moments: Moments) -> Tensor | None:
    """Return each image's group [B] in calibration, int64, or None if the group of any isn't known."""
    if not len(moments.group_ids):
        return None
    group_of = dict(zip(moments.image_ids.tolist(), moments.group_ids.tolist(), strict=True))
    group_ids = [group_of.get(each) for each in images.ids.tolist()]
    return None if None in group_ids else torch.tensor(group_ids, dtype=torch.int64)


def inputs_to_polish(
    request: ReductionRequest, images: InputSet | None, moments: Moments, judges: JudgeChoice | None
) -> PolishInputs | None:
    """Divide the images into those that a polish is fitted to and its judges; None without a polish or images.

    Inputs that calibration left out (--hold-out) judge the polish, because on the calibration inputs the closed form
    errs too little and would seem better. If the request has a limit (--within), the left-out inputs judge only the
    limit, and the polish holds out some of its own.
    """
    if request.options.polish_options is None or images is None:
        return None
    if judges is not None:
        fitted, _ = judges.apart(images, moments)
        return PolishInputs(reduced_on=images, fitted=fitted, groups_B=_groups(fitted, moments), judges=None)
    was_seen_B = torch.isin(images.ids, moments.image_ids)
    if bool(was_seen_B.all()) or not bool(was_seen_B.any()):
        return PolishInputs(reduced_on=images, fitted=images, groups_B=_groups(images, moments), judges=None)
    fitted, others = (images.subset(each.nonzero().squeeze(1).tolist()) for each in (was_seen_B, ~was_seen_B))
    return PolishInputs(reduced_on=fitted, fitted=fitted, groups_B=None, judges=others)


def with_polish(
    dense: nn.Module,
    reduction: Reduction,
    options: PolishOptions,
    inputs: PolishInputs,
    how: Polishing,
    *,
    reads: Reads | None,
    optional: bool,
) -> Reduction:
    """Return the reduction with its model polished and the polish's report.

    If the model can't be polished, an `optional` polish, which a preset or an effort implies, is left out with a
    sentence in `decisions`, and any other raises BadInput.
    """
    if reason := reason_against(dense, reduction.model):
        if not optional:
            raise BadInput(f"polish layer: {reason}")
        said = f"no polish: {reason.partition(';')[0]}"
        return replace(reduction, decisions=(*reduction.decisions, said))
    result = polished(
        dense,
        reduction.model,
        inputs.fitted,
        options,
        groups_B=inputs.groups_B,
        judges=inputs.judges,
        reads=reads,
        state=how.state,
        on_progress=how.on_progress,
    )
    decisions = (*reduction.decisions, result.report.line)
    return replace(reduction, model=result.model, decisions=decisions, polish=result.report.as_json())
