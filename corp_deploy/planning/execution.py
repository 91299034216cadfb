"""Reduction requests executed on a checkpoint; the smaller model is written with its lineage."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from calib.store import load_moments
from corp_deploy.families import traced_model
from corp_deploy.families.family import sites_of
from corp_deploy.invocation.reduction import ReduceOptions
from corp_deploy.reduction.calibration_warnings import warnings_of_moments
from corp_deploy.reduction.model import Reduction, uniform_widths
from corp_deploy.reduction.moments import merging_note, require_disjoint, require_same_model, without_held_out
from corp_deploy.reduction.sparsify import Sparsifying, sparsify
from corp_deploy.store.checkpoint import Checkpoint, on_device, save
from corp_deploy.store.transformers_saved import FOLDER, transformers_form, write_transformers
from ground.effort import Stopwatch, measure_effort
from ground.errors import BadInput

from .carried_out import Polishing, carry_out, carry_out_better, inputs_to_polish, with_polish
from .judging import Judge, JudgeChoice, judges_from_choice
from .limit_search import find_smallest_within, format_figure
from .plan import build_planner, make_plan
from .refusals import (
    apply_asked_merging,
    refuse_options,
    refuse_other_eps,
    refuse_outdated,
    require_images,
    require_sayable,
)
from .request import ReductionRequest, WidthPlan, apply_merging, build_reduced_checkpoint, build_request


def _planned(
    dense: Checkpoint,
    moments: Moments,
    request: ReductionRequest,
    images: InputSet | None,
    watch: Stopwatch | None,
) -> tuple[Checkpoint, WidthPlan]:
    """Return the model with the plan's merging, and the plan with sentences on merged tokens and on the moments."""
    looks = request.options.share is not None or request.options.auto_heads
    with torch.inference_mode(), measure_effort(watch if looks else None, "plan"):
        planned = make_plan(dense, moments, request, images, watch)
    # Outside inference mode, since weights that are copied in it can't be run with gradients.
    dense = apply_merging(dense, planned.merging)
    merging, words = traced_model.merging_of(dense.model), list[str]()
    if merging is not None:
        words.append(f"tokens {merging.describe()}")
    widths = uniform_widths(dense.model, planned.method) if planned.widths is None else planned.widths
    narrower = any(widths.get(site.name, site.width) != site.width for site in sites_of(dense.model).every)
    if request.options.loop is None and narrower and (note := merging_note(dense.model, moments)):
        words.append(note)  # layers are fitted to the moments
    return dense, replace(planned, decisions=(*planned.decisions, *words))


def reduce_as_asked(
    dense: Checkpoint,
    moments: Moments,
    request: ReductionRequest,
    *,
    images: InputSet | None = None,
    judges: JudgeChoice | None = None,
    held_out: Moments | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> tuple[Reduction, WidthPlan]:
    """Plan a reduction and carry it out; return the reduction and its plan.

    It takes one pass over the moments or the closed loop over the images, or with an effort the better of both. A limit
    (--within) is searched by many reductions, judged on images of `judges`. Moments of other images, `held_out`, give
    every site a held-out error; ReduceOptions refuses them with a closed loop. Raises BadInput if the request doesn't
    fit the model or its moments, or removes less than it asks for.
    """
    dense, request = apply_asked_merging(dense, request)
    require_same_model(dense.model, moments)
    refuse_options(dense, request)
    refuse_other_eps(moments, request)
    assert held_out is None or not (request.options.loop or request.options.composes), request.options
    if held_out is not None:
        require_same_model(dense.model, held_out)
        require_disjoint(moments, held_out)
    reduced = partial(carry_out, moments=moments, request=request, held_out=held_out, watch=watch)
    if request.options.limit is not None:
        if images is None or judges is None:
            raise BadInput(
                "--within fits to calibration images and judges on others; give --images (with some that calibrate "
                "--hold-out left out, or --judge), or --text for a text encoder"
            )
        fitted, judging = judges.apart(images, moments)
        with measure_effort(watch, "within"):
            with torch.inference_mode():
                planner = build_planner(dense, moments, request, fitted, watch)
            return find_smallest_within(
                request.options.limit,
                planner,
                judging,
                lambda planned: reduced(apply_merging(dense, planned.merging).model, planned, images=fitted),
                on_progress=on_progress,
            )
    require_images(request, images)
    if request.options.composes:
        assert images is not None, request
        planning = partial(_planned, dense, moments, images=images, watch=watch)
        return carry_out_better(planning, moments, request, images, on_progress=on_progress, watch=watch)
    merged, planned = _planned(dense, moments, request, without_held_out(images, held_out), watch)
    return reduced(merged.model, planned, images=images, on_progress=on_progress), planned


def _limited(
    dense: nn.Module,
    moments: Moments,
    request: ReductionRequest,
    reduction: Reduction,
    polished: Reduction,
    *,
    images: InputSet | None,
    judges: JudgeChoice | None,
) -> Reduction:
    """Return the polished reduction or, if it exceeds a limit, the unpolished one; a limit adds a sentence on it."""
    limit = request.options.limit
    if limit is None or images is None or judges is None or polished.polish is None:
        return polished
    _, judging = judges.apart(images, moments)
    value = Judge(dense, judging, limit.measure).of(polished.model).value
    if limit.holds(value):
        kept, said = polished, f"after the polish: {format_figure(limit, value)}"
    else:
        kept, said = reduction, f"the polish is left out: it gives {format_figure(limit, value)}, beyond {limit}"
    return replace(kept, decisions=(*kept.decisions, said))


def reduce_checkpoint(
    dense: Checkpoint,
    moments_file: Path,
    options: ReduceOptions,
    *,
    directory: Path,
    moments: Moments | None = None,
    images: InputSet | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    polishing: Polishing | None = None,
    watch: Stopwatch | None = None,
) -> tuple[Reduction, WidthPlan]:
    """Reduce a model, polish and sparsify it if the options ask for that, and write it to a directory.

    The model is reduced on the device of the options, and also written in the form of transformers if they ask for
    it. Nothing is written unless all of it succeeds, except the state of a polish, from which the same call
    continues. `moments`: those of the file, if the caller has opened it.
    """
    dense, request = on_device(dense, options.device), build_request(options)
    refuse_outdated(directory, request)
    require_sayable(dense, request)
    moments = load_moments(moments_file) if moments is None else moments
    judges = judges_from_choice(dense.model, images, options)
    held_out = None if options.held_out is None else load_moments(Path(options.held_out))
    how = polishing or Polishing()
    polish_inputs = inputs_to_polish(request, images, moments, judges)
    reduction, planned = reduce_as_asked(
        dense,
        moments,
        request,
        images=images if polish_inputs is None else polish_inputs.reduced_on,
        judges=judges,
        held_out=held_out,
        on_progress=on_progress,
        watch=watch,
    )
    if polish_inputs is not None and options.polish_options is not None:
        with measure_effort(watch, "polish"):
            polished = with_polish(
                dense.model,
                reduction,
                options.polish_options,
                polish_inputs,
                how,
                reads=options.reads,
                optional=options.polish is None,
            )
        reduction = _limited(dense.model, moments, request, reduction, polished, images=images, judges=judges)
    if options.patterns:
        with measure_effort(watch, "sparsify"):
            fitted = without_held_out(images, held_out) if polish_inputs is None else polish_inputs.fitted
            assert fitted is not None, options
            sparse = Sparsifying(kinds=options.patterns, rule=options.sparse_pattern, permute=options.sparse_permute)
            model, report = sparsify(reduction.model, fitted, sparse, on_progress=on_progress)
            decisions = (*reduction.decisions, *report.sentences())
            reduction = replace(reduction, model=model, sparsity=report, decisions=decisions)
    notes = (*reduction.notes, *warnings_of_moments(dense.model, moments))
    reduction = replace(reduction, model=reduction.model.cpu(), notes=notes)
    # Inputs that judge a limit or stop a polish choose the model, so they can't prove it too.
    chosen_by = [images, None if judges is None else judges.inputs]
    only_reported = options.within is None and options.polish_options is None
    looked_at = [without_held_out(images, held_out)] if only_reported else chosen_by
    written = build_reduced_checkpoint(
        dense, reduction, planned, options.preset, moments, moments_file, held_out, looked_at
    )
    theirs = None if options.save_as is None else transformers_form(written)
    save(written, directory)
    if theirs is not None:
        write_transformers(*theirs, directory / FOLDER)
    if how.state is not None:
        how.state.unlink(missing_ok=True)
    return reduction, planned
