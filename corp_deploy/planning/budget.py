"""Widths for one budget: the knapsack over every site's cost curve, exact, and uniform widths beside it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from corp_deploy.algebra import knapsack
from corp_deploy.reduction.method import Method
from corp_deploy.reduction.model import uniform_widths
from corp_deploy.spec.merging import Merging
from corp_deploy.spec.widths import Width
from ground.errors import BadInput

from .curves import CostCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Widths by site, the share of the dense cost that stays, and the relative output error the curves predict;
    `merging`: the tokens that are merged away for it, `name`: what tells it from others of the same budget.
    """

    widths: dict[str, Width]
    share: float
    predicted_error: float
    merging: Merging | None = None
    name: str = "by site"


def allocate(curves: list[CostCurve], dense: int, share: float, *, full_cost: int | None = None) -> Allocation:
    """The widths of least predicted error that keep at most `share` of the dense cost; exact.

    `dense` is the cost at the sites' own widths; shares are of `full_cost`, which is more where tokens are merged, and
    the same by default. Raises BadInput when even the narrowest widths cost more.
    """
    full_cost = dense if full_cost is None else full_cost
    fixed = dense - sum(curve.cost_now for curve in curves)
    together: dict[str, list[CostCurve]] = {}
    for curve in curves:
        together.setdefault(curve.tied or curve.site, []).append(curve)
    together = {name: _of_one_length(own) for name, own in together.items()}
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
        raise out_of_reach(curves, dense, share, least / full_cost, full_cost=full_cost)
    best = knapsack.solve_knapsack(options, share * full_cost - fixed)
    widths = {curve.site: curve.widths[best.widths[name]] for name, own in together.items() for curve in own}
    return Allocation(widths=widths, share=(best.cost + fixed) / full_cost, predicted_error=best.error**0.5)


def _of_one_length(tied: list[CostCurve]) -> list[CostCurve]:
    """Where a site goes whole, one that is tied to it and can't is as narrow as it may be, which loses no more."""
    most = max(len(curve.widths) for curve in tied)
    short = [(curve, most - len(curve.widths)) for curve in tied]
    return [
        replace(
            curve,
            widths=curve.widths[:1] * lacking + curve.widths,
            costs=curve.costs[:1] * lacking + curve.costs,
            errors=(0.0,) * lacking + curve.errors,
        )
        for curve, lacking in short
    ]


def out_of_reach(curves: list[CostCurve], dense: int, share: float, least: float, *, full_cost: int) -> BadInput:
    """Why no widths keep so little; `least`: the share that the narrowest ones keep."""
    stays = dense - sum(curve.cost_now for curve in curves if len(curve.costs) > 1)
    return BadInput(
        f"a budget of {share:g} is out of reach: the narrowest widths keep {least:.3f}, "
        f"of which {stays / full_cost:.3f} belongs to no site that budgets reduce (see inspect; streams go by "
        "--residual); ask for more"
    )


def uniform(
    model: nn.Module, method: Method, curves: list[CostCurve], dense: int, *, full_cost: int | None = None
) -> Allocation:
    """What the method's own uniform sparsities leave and lose, by the curves; other sites stay. See `allocate`."""
    fixed = dense - sum(curve.cost_now for curve in curves)
    even_widths = uniform_widths(model, method)
    widths = {curve.site: even_widths.get(curve.site, curve.widths[-1]) for curve in curves}
    picks = [(curve, curve.widths.index(widths[curve.site])) for curve in curves]
    cost = fixed + sum(curve.costs[pick] for curve, pick in picks)
    error = sum(curve.errors[pick] for curve, pick in picks) ** 0.5
    return Allocation(widths=widths, share=cost / (full_cost or dense), predicted_error=error)


def uniform_for_share(
    model: nn.Module,
    method: Method,
    curves: list[CostCurve],
    dense: int,
    share: float,
    *,
    full_cost: int | None = None,
    used: Callable[[Allocation], Allocation] = lambda each: each,
) -> tuple[float, Allocation] | None:
    """The least uniform sparsity (in percent steps) that meets the same budget, to stand beside allocated widths. None
    where none does: measured costs need not fall with every width. `used`: with the share that widths do use.
    """
    for percent in range(100):
        even = percent / 100
        evenly = replace(method, mlp_sparsity=even, attention_sparsity=even, conv_sparsity=even)
        found = used(uniform(model, evenly, curves, dense, full_cost=full_cost))
        if found.share <= share:
            return even, replace(found, name=f"uniform sparsity {even:.2f}")
    return None
