"""The multiple-choice knapsack, solved exactly: the width of every site under one budget.

Partial choices are kept as a frontier of (cost, error): no other one is better in both. A price on cost bounds each:
at that price the best completion of a partial choice is known at once, and a partial choice whose bound lies above a
known feasible solution cannot be part of the best. Any price gives a valid bound (Lagrange); the price at which the
budget is just met gives a sharp one.

Legend: N options of a site, S partial choices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ground.errors import BadInput

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOptions:
    """One site's widths with the cost of each (in the budget's unit) and its weighted error."""

    site: str
    widths: tuple[int, ...]
    costs: tuple[float, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.widths) == len(self.costs) == len(self.errors) > 0, self
        numbers = (*self.costs, *self.errors)
        assert all(np.isfinite(numbers)), self
        assert min(numbers) >= 0.0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The width of every site, and the total cost and error."""

    widths: Mapping[str, int]
    cost: float
    error: float


def _best_at_price(sites: Sequence[SiteOptions], price: float) -> list[int]:
    """Return the index of every site's option of least error + price * cost, the cheaper one on a tie."""
    return [min(range(len(s.widths)), key=lambda n: (s.errors[n] + price * s.costs[n], s.costs[n])) for s in sites]


def _total_cost(sites: Sequence[SiteOptions], picks: Sequence[int]) -> float:
    return sum(site.costs[pick] for site, pick in zip(sites, picks, strict=True))


def _price_of_budget(sites: Sequence[SiteOptions], budget: float) -> float:
    """Return the least price (to rounding) at which the options of `_best_at_price` cost at most the budget."""
    if _total_cost(sites, _best_at_price(sites, 0.0)) <= budget:
        return 0.0
    low, high = 0.0, 1e-30
    while _total_cost(sites, _best_at_price(sites, high)) > budget:
        low, high = high, high * 16.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _total_cost(sites, _best_at_price(sites, middle)) <= budget else (middle, high)
    return high


def _frontier(cost_S: Array, error_S: Array) -> NDArray[np.int64]:
    """Return the indices of the partial choices with less error than all others that cost no more, cheapest first."""
    order = np.lexsort((error_S, cost_S))
    best_before = np.concatenate(([np.inf], np.minimum.accumulate(error_S[order])[:-1]))
    return order[error_S[order] < best_before]


def solve_knapsack(sites: Sequence[SiteOptions], budget: float) -> Selection:
    """Return the exact widths of least total error within `budget`, the cheapest on a tie, with total cost and error.

    Raises:
        BadInput: even the cheapest options cost more than the budget.
    """
    names = [site.site for site in sites]
    assert len(set(names)) == len(names), names
    least = sum(min(site.costs) for site in sites)
    if least > budget * (1.0 + 1e-12):
        raise BadInput(f"budget {budget:g} is less than the {least:g} that the narrowest widths cost; raise the budget")
    limit = max(budget, least) * (1.0 + 1e-12)
    price = _price_of_budget(sites, limit)
    ceiling = sum(site.errors[pick] for site, pick in zip(sites, _best_at_price(sites, price), strict=True))
    slack = 1e-9 * ceiling + 1e-14 * len(sites) * price * limit  # rounding of the bound below
    rest_bound = [min(e + price * c for e, c in zip(s.errors, s.costs, strict=True)) for s in sites]
    rest_cost = [min(s.costs) for s in sites]

    cost_S: Array = np.zeros(1)
    error_S: Array = np.zeros(1)
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for position, site in enumerate(sites):
        grown_cost: Array = np.add.outer(cost_S, np.asarray(site.costs)).ravel()
        grown_error: Array = np.add.outer(error_S, np.asarray(site.errors)).ravel()
        bound = grown_error + price * (grown_cost - limit) + sum(rest_bound[position + 1 :])
        possible = np.flatnonzero((grown_cost + sum(rest_cost[position + 1 :]) <= limit) & (bound <= ceiling + slack))
        stay = possible[_frontier(grown_cost[possible], grown_error[possible])]
        trail.append(np.divmod(stay, len(site.widths)))
        cost_S, error_S = grown_cost[stay], grown_error[stay]

    state = int(error_S.argmin())
    cost, error = float(cost_S[state]), float(error_S[state])
    widths: dict[str, int] = {}
    for site, (parent, pick) in zip(reversed(sites), reversed(trail), strict=True):
        widths[site.site] = site.widths[int(pick[state])]
        state = int(parent[state])
    return Selection(widths={site.site: widths[site.site] for site in sites}, cost=cost, error=error)
