"""What is planned, carried out: in one pass over the moments or in the closed loop over the images."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.reduction.model import Reduction, reduce
from corp_deploy.reduction.overfitting import data_gap
from corp_deploy.reduction.traced_loop import reduce_traced
from ground.effort import Stopwatch, measured

from .request import ReductionRequest
from .width_plan import WidthPlan


def as_planned(
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
    """In one pass over the moments, or in the closed loop over the images that the request asks for, with what its
    sites lose on images that they are not fitted to, where groups of images tell it.

    `watch` takes the time of selection, of recovery and of a loop, which does both in turns, apart.
    """
    if request is not None and request.options.loop is not None:
        assert images is not None
        with measured(watch, "closed loop"):
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
        with measured(watch, "recover"):
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
    said = gap.sentence("at these widths, sites lose")
    return replace(reduction, gap=gap, decisions=(*reduction.decisions, said))
