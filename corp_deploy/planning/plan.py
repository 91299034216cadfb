"""The plan of a reduction: the widths and merged tokens of a budget, and the geometry of the heads."""

from dataclasses import replace

from calib.inputs import InputSet
from calib.moments import Moments
from corp_deploy.families.family import sites_of
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.values import TracedValues
from ground.effort import Stopwatch
from ground.errors import BadInput

from .budget import allocate_uniformly, allocate_widths
from .budget_planner import Planner, build_budget_planner, build_probe, probe_allocations
from .curves import compute_cost_curves
from .first_plan import dense_cost
from .joint_planner import build_joint_planner
from .probe import Probe
from .request import ReductionRequest, WidthPlan


def choose_heads(probe: Probe, share: float | None) -> WidthPlan:
    """Plan widths of the same MACs for padded and for square heads; return the plan of less predicted error.

    The budget is `share` of the dense MACs. If that is None, the budget is the share that the method's uniform
    sparsities leave with padded heads, or with square heads if some queries and keys can't be reduced: then only square
    heads reduce the attention.
    """
    dense = dense_cost(probe.model, "macs")
    methods = [replace(probe.method, geometry=geometry) for geometry in ("padded", "square")]
    curves = [compute_cost_curves(replace(probe, method=method), "macs") for method in methods]
    if share is None:
        stays = any(isinstance(site, TracedValues) and site.queries is None for site in sites_of(probe.model).every)
        share = allocate_uniformly(probe.model, methods[stays], curves[stays], dense).share
    ways = [
        (method, replace(allocate_widths(own, dense, share), name=f"{method.geometry} heads"))
        for method, own in zip(methods, curves, strict=True)
    ]
    (method, better), (_, worse) = sorted(ways, key=lambda way: way[1].predicted_error)
    reason = (
        f"heads: {method.geometry}, because at {share:.1%} of the dense MACs its predicted logit error is "
        f"{better.predicted_error:.4f}, that of {worse.name} {worse.predicted_error:.4f}"
    )
    return WidthPlan(
        method=method,
        widths=better.widths,
        decisions=(reason,),
        ways=probe_allocations(probe, [way for _, way in ways]),
        eliminations=probe.eliminations,
        metrics=probe.moments.metrics,
    )


def build_planner(
    dense: Checkpoint, moments: Moments, request: ReductionRequest, images: InputSet, watch: Stopwatch | None = None
) -> Planner:
    """Return the planner for the cost that the request counts, joint with token merging if it asks for that."""
    build = build_joint_planner if request.options.auto_merging else build_budget_planner
    return build(dense, moments, request, images, watch)


def make_plan(
    dense: Checkpoint,
    moments: Moments,
    request: ReductionRequest,
    images: InputSet | None,
    watch: Stopwatch | None = None,
) -> WidthPlan:
    """Plan widths and the geometry of heads; `watch` records the time of selection by itself.

    Without images, or with neither a budget nor automatic heads, the widths are None. Raises BadInput if the request
    chooses merged tokens without a budget, or compares heads at another cost than MACs.
    """
    options, share = request.options, request.options.share
    if options.auto_merging and (share is None or options.auto_heads):
        raise BadInput(
            "--merge-tokens auto needs a budget, for which it chooses the tokens that each block merges; give --macs, "
            "--latency (without --heads auto) or --within, or numbers of tokens: 12 in each block, grow:36"
        )
    if images is None or (share is None and not options.auto_heads):
        return WidthPlan(method=request.method, widths=None, decisions=())
    if options.auto_heads:
        if share is not None and request.priced_in != "macs":
            raise BadInput("--heads auto compares at equal MACs; expected --macs, or no budget")
        return choose_heads(build_probe(dense, moments, request.method, images, watch=watch), share)
    assert share is not None, request
    return build_planner(dense, moments, request, images, watch).tried_at(share)
