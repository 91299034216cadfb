"""Widths for one budget: the exact knapsack over the cost curves of all sites, and uniform widths to compare."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from corp_deploy.algebra import knapsack
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.merging import Merging
from ground.errors import BadInput

from .curves import CostCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Widths by site, the share of the dense cost that they keep, and the relative output error the curves predict.

    `merging` is the token merging that is part of the allocation; `name` tells it from others of the same budget.
    """

    widths: dict[str, int]
    share: float
    predicted_error: float
    merging: Merging | None = None
    name: str = "by site"


def allocate_widths(curves: list[CostCurve], dense: int, share: float, *, full_cost: int | None = None) -> Allocation:
    """Return the allocation of least predicted error that keeps at most `share` of the cost; the solution is exact.

    `dense` is the model's cost at the sites' present widths. Shares refer to `full_cost`, by default `dense`; it is
    larger if the model merges tokens. Raises BadInput if even the narrowest widths cost more.
    """
    full_cost = dense if full_cost is None else full_cost
    fixed = dense - sum(curve.cost_now for curve in curves)
    together: dict[str, list[CostCurve]] = {}
    for curve in curves:
        together.setdefault(curve.tied or curve.site, []).append(curve)
    together = {name: _padded_to_one_length(own) for name, own in together.items()}
    options = [
        knapsack.SiteOptions(
            site=name,
            widths=tuple(range(len(own[0].widths))),
            costs=tuple(map(float, map(sum, zip(*(each.costs for each in own), strict=True)))),
            errors=tuple(map(sum, zip(*(each.errors for each in own), strict=True))),
        )
        for name, own in together.items()
    ]
    least = fixed + sum(curve.costs[0] for curve in curves)
    if least > share * full_cost:
        raise unreachable_budget(curves, dense, share, least / full_cost, full_cost=full_cost)
    best = knapsack.solve_knapsack(options, share * full_cost - fixed)
    widths = {curve.site: curve.widths[best.widths[name]] for name, own in together.items() for curve in own}
    return Allocation(widths=widths, share=(best.cost + fixed) / full_cost, predicted_error=best.error**0.5)


def _padded_to_one_length(tied: list[CostCurve]) -> list[CostCurve]:
    """Return tied curves with equally many widths: shorter ones repeat their first width, with an error of 0.

    If one of two tied sites can be removed whole and the other can't, the other then takes its narrowest width.
    """
    longest, padded = max(len(curve.widths) for curve in tied), []
    for curve in tied:
        lacking = longest - len(curve.widths)
        widths, costs = curve.widths[:1] * lacking + curve.widths, curve.costs[:1] * lacking + curve.costs
        padded.append(replace(curve, widths=widths, costs=costs, errors=(0.0,) * lacking + curve.errors))
    return padded


def unreachable_budget(curves: list[CostCurve], dense: int, share: float, least: float, *, full_cost: int) -> BadInput:
    """Return the refusal of a budget below `least`, the share that the narrowest widths keep."""
    stays = dense - sum(curve.cost_now for curve in curves if len(curve.costs) > 1)
    return BadInput(
        f"a budget of {share:g} is out of reach: the narrowest widths keep {least:.3f}, "
        f"of which {stays / full_cost:.3f} is in parts that no budget reduces (see inspect; --residual reduces "
        "streams); raise the budget"
    )


def allocate_uniformly(
    model: nn.Module, method: Method, curves: list[CostCurve], dense: int, *, full_cost: int | None = None
) -> Allocation:
    """Return the allocation of the method's uniform sparsities, with its share and error read from the curves.

    Sites that the sparsities don't reduce keep their widths; `dense` and `full_cost` are as in `allocate_widths`.
    """
    fixed = dense - sum(curve.cost_now for curve in curves)
    even_widths = uniform_widths(model, method)
    widths = {curve.site: even_widths.get(curve.site, curve.widths[-1]) for curve in curves}
    picks = [(curve, curve.widths.index(widths[curve.site])) for curve in curves]
    cost = fixed + sum(curve.costs[pick] for curve, pick in picks)
    error = sum(curve.errors[pick] for curve, pick in picks) ** 0.5
    return Allocation(widths=widths, share=cost / (full_cost or dense), predicted_error=error)


def find_uniform_for_share(
    model: nn.Module,
    method: Method,
    curves: list[CostCurve],
    dense: int,
    share: float,
    *,
    full_cost: int | None = None,
    used: Callable[[Allocation], Allocation] = lambda each: each,
) -> Allocation | None:
    """Return the allocation of the smallest uniform sparsity, 0.00 to 0.99, that keeps at most `share` of the cost.

    The result is None if no sparsity does, as measured costs need not fall with the width. Curves price each site by
    itself; `used` replaces an allocation's share by what its widths cost together, if sites share layers.
    """
    for percent in range(100):
        even = percent / 100
        evenly = replace(method, mlp_sparsity=even, attention_sparsity=even, conv_sparsity=even)
        found = used(allocate_uniformly(model, evenly, curves, dense, full_cost=full_cost))
        if found.share <= share:
            return replace(found, name=f"uniform sparsity {even:.2f}")
    return None
