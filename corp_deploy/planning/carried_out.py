"""What is planned, carried out: in one pass over the moments or in the closed loop over the images."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.overfitting import data_gap
from corp_deploy.reduction.traced_loop import reduce_traced
from corp_deploy.store.checkpoint import Checkpoint
from ground.effort import Stopwatch, measured

from .request import ReductionRequest
from .width_plan import WidthPlan


def as_planned(
    dense: Checkpoint,
    planned: WidthPlan,
    *,
    moments: Moments,
    request: ReductionRequest,
    images: InputSet | None,
    held_out: Moments | None,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> Reduction:
    """In one pass over the moments, or in the closed loop over the images. `watch` takes the time of selection, of
    recovery and of a loop, which does both in turns, apart.
    """
    if request.options.loop is not None:
        assert images is not None
        with measured(watch, "closed loop"):
            loop, widths, metrics = request.loop(moments), planned.widths, planned.metrics
            reduction = reduce_traced(
                dense.model,
                images,
                planned.method,
                widths=widths,
                loop=loop,
                metrics=metrics,
                on_progress=on_progress,
            )
        return _with_gap(reduction, moments)
    return in_one_pass(
        dense.model, moments, planned, images=images, held_out=held_out, on_progress=on_progress, watch=watch
    )


def in_one_pass(
    model: nn.Module,
    moments: Moments,
    planned: WidthPlan,
    *,
    images: InputSet | None,
    held_out: Moments | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    watch: Stopwatch | None = None,
) -> Reduction:
    """What is planned, repaired by the moments."""
    with measured(watch, "recover"):
        reduction = reduce(
            model,
            replace(moments, metrics=planned.metrics),
            planned.method,
            widths=planned.widths,
            eliminations=planned.eliminations,
            held_out=held_out,
            images=images,
            on_progress=on_progress,
            watch=watch,
        )
    return _with_gap(reduction, moments)


def _with_gap(reduction: Reduction, moments: Moments) -> Reduction:
    """With what its sites lose on images that they are not fitted to, where groups of images tell it."""
    gap = data_gap(reduction.sites, moments)
    if gap is None:
        return reduction
    said = gap.sentence("at these widths, sites lose")
    return replace(reduction, gap=gap, decisions=(*reduction.decisions, said))
