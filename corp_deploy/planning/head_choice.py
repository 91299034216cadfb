"""Square or padded heads: which loses less at the same MACs, by the error curves of both."""

from dataclasses import dataclass, replace

from corp_deploy.families.family import sites_of
from corp_deploy.reduction.method import Method

from .budget import Allocation, allocate, dense_cost, uniform
from .curves import cost_curves
from .probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadChoice:
    """The geometry taken, its widths, the sentence that says why, and what every geometry would have been given."""

    method: Method
    allocated: Allocation
    reason: str
    ways: dict[str, Allocation]


def choose_heads(probe: Probe, share: float | None) -> HeadChoice:
    """Spend the same MACs on padded and on square heads and take the one whose curves predict less logit error.

    `share` of the dense MACs is the budget; None takes what the method's uniform sparsities leave with padded heads, or
    with square ones where Q/K must stay, since padded heads alone take nothing from those.
    """
    dense = dense_cost(probe.model, "macs")
    padded = replace(probe, method=replace(probe.method, geometry="padded"))
    square = replace(probe, method=replace(probe.method, geometry="square"))
    padded_curves, square_curves = cost_curves(padded, "macs"), cost_curves(square, "macs")
    if share is None:
        stays = any(site.keeps_qk for site in sites_of(probe.model).heads)
        way, curves = (square, square_curves) if stays else (padded, padded_curves)
        share = uniform(way.model, way.method, curves, dense).share
    ways = ((padded, allocate(padded_curves, dense, share)), (square, allocate(square_curves, dense, share)))
    better, worse = sorted(ways, key=lambda way: way[1].predicted_error)
    name, other = better[0].method.geometry, worse[0].method.geometry
    reason = (
        f"heads: {name}, because at {share:.1%} of the dense MACs its predicted logit error is "
        f"{better[1].predicted_error:.4f}, that of {other} heads {worse[1].predicted_error:.4f}"
    )
    every = {f"{probe.method.geometry} heads": allocated for probe, allocated in ways}
    return HeadChoice(method=better[0].method, allocated=better[1], reason=reason, ways=every)
