"""Settle what a reduction does before it is done: the widths of a budget, the geometry of the heads."""

from calib.input_set import InputSet
from calib.moments import Moments
from corp_deploy.store.checkpoint import Checkpoint
from ground.effort import Stopwatch
from ground.errors import BadInput

from .budget_planner import budget_planner, probe_of, probed
from .head_choice import choose_heads
from .joint_planner import joint_planner
from .request import ReductionRequest, loop_of
from .width_plan import WidthPlan


def plan(
    dense: Checkpoint,
    moments: Moments,
    asked: ReductionRequest,
    images: InputSet | None,
    watch: Stopwatch | None = None,
) -> WidthPlan:
    """Settle geometry and widths. `watch` takes the time of selecting as a part of its own. Raises BadInput when images
    are needed and missing.
    """
    if asked.merging.is_auto and (asked.budget is None or asked.auto_heads):
        raise BadInput(
            "--merge-tokens auto chooses for a budget what each block merges away; give --macs or --latency (without "
            "--heads auto) or --within, or say how many tokens: 12 in each block, grow:36"
        )
    if asked.needs_images and images is None:
        raise BadInput(
            "a budget, --within, --heads auto, --closed-loop, --rescale, --polish, --sparse, heads that "
            "are merged (--select heads=fold) and presets that merge channels (grail-fold, fold) look at the "
            "calibration images; give them with --images, or --text for a text encoder"
        )
    if images is None or not (asked.budget or asked.auto_heads):
        return WidthPlan(method=asked.method, widths=None, said=())
    if asked.auto_heads:
        if asked.budget is not None and asked.budget.currency != "macs":
            raise BadInput("--heads auto compares at equal MACs; expected --macs, or no budget")
        probe = probe_of(dense, moments, asked.method, images, watch=watch)
        choice = choose_heads(probe, None if asked.budget is None else asked.budget.share)
        return WidthPlan(
            method=choice.method,
            widths=choice.allocated.widths,
            said=(choice.reason,),
            ways=tuple(probed(name, probe, allocation) for name, allocation in choice.ways.items()),
            eliminations=probe.eliminations,
        )
    budget = asked.budget
    assert budget is not None, asked
    if asked.merging.is_auto:
        joint = joint_planner(dense, moments, asked, images, budget.currency, where=budget.where, watch=watch)
        return joint.tried_at(budget.share)
    planner = budget_planner(
        dense,
        moments,
        asked.method,
        images,
        currency=budget.currency,
        where=budget.where,
        loop=loop_of(asked, moments),
        watch=watch,
    )
    return planner.tried_at(budget.share)
