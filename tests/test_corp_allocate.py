"""The knapsack against every combination there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_deploy.algebra.knapsack import Allocation, Choices, allocate
from ground.errors import BadInput

NUMBERS = st.one_of(st.integers(0, 6).map(float), st.floats(0.0, 10.0), st.integers(10**9, 10**12).map(float))


@st.composite
def problems(draw: st.DrawFn) -> list[Choices]:
    sites = []
    for position in range(draw(st.integers(1, 5))):
        pairs = draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5))
        costs, errors = zip(*pairs, strict=True)
        sites.append(
            Choices(site=f"site {position}", widths=tuple(range(1, len(pairs) + 1)), costs=costs, errors=errors)
        )
    return sites


def by_trying_all(sites: list[Choices], budget: float) -> tuple[float, float]:
    """(error, cost) of the best combination, the cheaper one on a tie."""
    combinations = itertools.product(*(range(len(site.widths)) for site in sites))
    totals = [
        (
            sum(s.errors[p] for s, p in zip(sites, picks, strict=True)),
            sum(s.costs[p] for s, p in zip(sites, picks, strict=True)),
        )
        for picks in combinations
    ]
    return min(total for total in totals if total[1] <= budget * (1 + 1e-12))


def check(sites: list[Choices], budget: float, got: Allocation) -> None:
    picks = [site.widths.index(got.widths[site.site]) for site in sites]
    assert got.cost == pytest.approx(sum(s.costs[p] for s, p in zip(sites, picks, strict=True)))
    assert got.error == pytest.approx(sum(s.errors[p] for s, p in zip(sites, picks, strict=True)))
    assert got.cost <= budget * (1 + 1e-9)


@given(sites=problems(), where=st.floats(0.0, 1.0))
@settings(max_examples=300, deadline=None)
def test_no_combination_within_the_budget_is_better(sites: list[Choices], where: float) -> None:
    least, most = sum(min(s.costs) for s in sites), sum(max(s.costs) for s in sites)
    budget = least + where * (most - least)
    got = allocate(sites, budget)
    check(sites, budget, got)
    error, _ = by_trying_all(sites, budget)
    assert got.error == pytest.approx(error, rel=1e-12, abs=1e-12)


def test_greedy_by_ratio_would_be_wrong_here() -> None:
    """The site with the best saving per cost leaves a gap that the two others fill better together."""
    sites = [
        Choices(site="a", widths=(1, 2), costs=(0.0, 6.0), errors=(13.0, 0.0)),
        Choices(site="b", widths=(1, 2), costs=(0.0, 5.0), errors=(10.0, 0.0)),
        Choices(site="c", widths=(1, 2), costs=(0.0, 5.0), errors=(10.0, 0.0)),
    ]
    got = allocate(sites, 10.0)
    assert dict(got.widths) == {"a": 1, "b": 2, "c": 2}
    assert (got.cost, got.error) == (10.0, 13.0)


def test_all_fits_and_ties_take_the_cheaper() -> None:
    sites = [
        Choices(site="a", widths=(8, 16, 24), costs=(1.0, 2.0, 3.0), errors=(5.0, 1.0, 1.0)),
        Choices(site="b", widths=(8, 16), costs=(1.0, 2.0), errors=(2.0, 0.0)),
    ]
    got = allocate(sites, 100.0)
    assert dict(got.widths) == {"a": 16, "b": 16}
    assert allocate(sites, 2.0).widths == {"a": 8, "b": 8}


def test_an_impossible_budget_is_refused_with_both_numbers() -> None:
    sites = [Choices(site="a", widths=(8,), costs=(5.0,), errors=(0.0,))]
    with pytest.raises(BadInput, match=r"budget 4 .* 5 "):
        allocate(sites, 4.0)


@pytest.mark.parametrize("errors", [(1.0,), (1.0, float("nan")), (1.0, -1.0)])
def test_choices_refuse_what_cannot_be(errors: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        Choices(site="a", widths=(8, 16), costs=(1.0, 2.0), errors=errors)


def test_a_deep_model_is_no_trouble() -> None:
    """36 sites and real-valued costs, of which no two sums agree; the bound keeps it small."""
    sites = [
        Choices(
            site=f"site {i}",
            widths=tuple(range(1, 33)),
            costs=tuple((w + 0.37 * ((w * 7919 + i * 104729) % 97) / 97) * (1 + i % 3) for w in range(1, 33)),
            errors=tuple((1 + i % 5) * 2.0 ** (-w / (3 + i % 4)) for w in range(1, 33)),
        )
        for i in range(36)
    ]
    budget = 0.5 * sum(max(s.costs) for s in sites)
    got = allocate(sites, budget)
    check(sites, budget, got)
    assert got.cost > 0.999 * budget
