"""solve_knapsack against brute force and against an integer-program solver."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import block_diag, coo_array

from corp_deploy.algebra.knapsack import Selection, SiteOptions, solve_knapsack
from tests.refusals import rejects

NUMBERS = st.one_of(st.integers(0, 6).map(float), st.floats(0.0, 10.0), st.integers(10**9, 10**12).map(float))


@st.composite
def problems(draw: st.DrawFn) -> list[SiteOptions]:
    sites = []
    for position in range(draw(st.integers(1, 5))):
        pairs = draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5))
        costs, errors = zip(*pairs, strict=True)
        sites.append(
            SiteOptions(site=f"site {position}", widths=tuple(range(1, len(pairs) + 1)), costs=costs, errors=errors)
        )
    return sites


def brute_force_error(sites: list[SiteOptions], budget: float) -> float:
    """Return the least error of all combinations within the budget."""
    combinations = itertools.product(*(zip(site.costs, site.errors, strict=True) for site in sites))
    totals = [(sum(cost for cost, _ in picks), sum(error for _, error in picks)) for picks in combinations]
    return min(error for cost, error in totals if cost <= budget * (1 + 1e-12))


def cost_range(sites: list[SiteOptions]) -> tuple[float, float]:
    return sum(min(site.costs) for site in sites), sum(max(site.costs) for site in sites)


def selection_within(sites: list[SiteOptions], budget: float) -> Selection:
    """Solve the knapsack, and assert that the totals are those of the chosen widths and within the budget."""
    got = solve_knapsack(sites, budget)
    places = [site.widths.index(got.widths[site.site]) for site in sites]
    assert got.cost == pytest.approx(sum(site.costs[at] for site, at in zip(sites, places, strict=True)))
    assert got.error == pytest.approx(sum(site.errors[at] for site, at in zip(sites, places, strict=True)))
    assert got.cost <= budget * (1 + 1e-9)
    return got


@given(sites=problems(), where=st.floats(0.0, 1.0))
@settings(max_examples=300, deadline=None)
def test_allocation_is_optimal_within_the_budget(sites: list[SiteOptions], where: float) -> None:
    least, most = cost_range(sites)
    budget = least + where * (most - least)
    found, expected = selection_within(sites, budget).error, brute_force_error(sites, budget)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_ample_budget_keeps_all_and_ties_take_the_cheaper() -> None:
    sites = [
        SiteOptions(site="a", widths=(8, 16, 24), costs=(1.0, 2.0, 3.0), errors=(5.0, 1.0, 1.0)),
        SiteOptions(site="b", widths=(8, 16), costs=(1.0, 2.0), errors=(2.0, 0.0)),
    ]
    assert dict(solve_knapsack(sites, 100.0).widths) == {"a": 16, "b": 16}
    assert solve_knapsack(sites, 2.0).widths == {"a": 8, "b": 8}


def test_impossible_budget_is_refused_with_both_numbers() -> None:
    sites = [SiteOptions(site="a", widths=(8,), costs=(5.0,), errors=(0.0,))]
    rejects(r"budget 4 .* 5 ", solve_knapsack, sites, 4.0)


def test_invalid_choices_are_refused() -> None:
    for errors in ((1.0,), (1.0, float("nan")), (1.0, -1.0)):
        with pytest.raises(AssertionError):
            SiteOptions(site="a", widths=(8, 16), costs=(1.0, 2.0), errors=errors)
    with pytest.raises(AssertionError, match="site 0"):
        solve_knapsack([site_of(0, [1], [1]), site_of(0, [2], [2])], 10.0)


def test_deep_model_is_allocated_in_bounded_memory() -> None:
    """No two sums of these costs are equal, so that only the bound keeps the frontier small."""
    sites = [
        SiteOptions(
            site=f"site {i}",
            widths=tuple(range(1, 33)),
            costs=tuple((w + 0.37 * ((w * 7919 + i * 104729) % 97) / 97) * (1 + i % 3) for w in range(1, 33)),
            errors=tuple((1 + i % 5) * 2.0 ** (-w / (3 + i % 4)) for w in range(1, 33)),
        )
        for i in range(36)
    ]
    budget = 0.5 * cost_range(sites)[1]
    assert selection_within(sites, budget).cost > 0.999 * budget


# Comparison with scipy.optimize.milp. Costs and errors are whole numbers, so that the solver's tolerances don't matter.


def milp_error(sites: list[SiteOptions], budget: float) -> float:
    """Return the least error by an integer program: a 0/1 variable for each width, of which each site sets one."""
    costs = np.asarray([cost for site in sites for cost in site.costs])
    errors = np.asarray([error for site in sites for error in site.errors])
    one_each = block_diag([coo_array(np.ones((1, len(site.widths)))) for site in sites])
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(costs[None], -np.inf, budget)]
    solved = milp(errors, integrality=np.ones(len(errors)), bounds=(0, 1), constraints=constraints,
                  options={"mip_rel_gap": 0.0})  # fmt: skip
    assert solved.success, solved.message
    return float(errors @ np.round(solved.x))


def site_of(place: int, costs: list[int], errors: list[int]) -> SiteOptions:
    widths = tuple(8 * (n + 1) for n in range(len(costs)))
    return SiteOptions(
        site=f"site {place}", widths=widths, costs=tuple(map(float, costs)), errors=tuple(map(float, errors))
    )


def random_sites(seed: int, sites: int, widths: int, most: int) -> list[SiteOptions]:
    rng = np.random.default_rng(seed)
    return [site_of(i, rng.integers(0, most, widths).tolist(), rng.integers(0, most, widths).tolist())
            for i in range(sites)]  # fmt: skip


def falling_sites(seed: int, sites: int, widths: int) -> list[SiteOptions]:
    """Return sites like a model's: a site's cost is proportional to its width, and its error falls with it."""
    rng = np.random.default_rng(seed)
    return [site_of(i, (np.arange(1, widths + 1) * int(rng.integers(1, 9))).tolist(),
                    np.sort(rng.integers(0, 1000, widths))[::-1].tolist()) for i in range(sites)]  # fmt: skip


def assert_equals_milp(sites: list[SiteOptions], budget: float) -> None:
    assert selection_within(sites, budget).error == milp_error(sites, budget), budget


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_allocation_equals_an_integer_program(seed: int, share: float) -> None:
    sites = random_sites(seed, 8, 6, 50) if seed % 2 else falling_sites(seed, 14, 10)
    least, most = cost_range(sites)
    assert_equals_milp(sites, float(round(least + share * (most - least))))


DEGENERATE = {
    "the same site many times": [site_of(i, [1, 2, 4, 8], [8, 4, 2, 1]) for i in range(12)],
    "dearer and worse": [site_of(i, [1, 2, 3], [1, 5, 7]) for i in range(5)],
    "sums that meet the budget alone": [site_of(i, [0, weight], [weight, 0]) for i, weight in
                                        enumerate((31, 57, 11, 23, 43, 19, 37, 29, 53, 41))],
    "one site outweighs the rest": [site_of(9, [0, 10**6], [10**6, 0]), *falling_sites(3, 5, 5)],
}  # fmt: skip


@pytest.mark.parametrize("sites", DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_problems_equal_the_integer_program(sites: list[SiteOptions]) -> None:
    for budget in np.linspace(*cost_range(sites), 15).round():
        assert_equals_milp(sites, float(budget))
