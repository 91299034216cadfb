"""Whole heads: scores and orders against loops and brute force, projections against least squares over samples."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from corp_deploy.algebra import whole_heads
from corp_deploy.algebra.fold import averages, cluster_rows
from corp_deploy.algebra.scores import kept_from_scores

HEADS, WIDTH, OUTPUTS = 4, 3, 5
KINDS = ("random", "ill-conditioned", "singular")


def samples(kind: str, heads: int = HEADS, count: int = 400) -> Tensor:
    """z [X, C] with a mean, its heads correlated."""
    generator = torch.Generator().manual_seed(7)
    width = heads * WIDTH
    z_XC = torch.randn(count, width, generator=generator, dtype=torch.float64)
    z_XC = z_XC @ torch.randn(width, width, generator=generator, dtype=torch.float64) + 2.0
    if kind == "ill-conditioned":
        z_XC = z_XC * 10.0 ** (-6.0 * torch.arange(width, dtype=torch.float64) / width)
    elif kind == "singular":
        z_XC[:, -WIDTH:] = z_XC[:, :WIDTH]
        z_XC[:, WIDTH] = 0.5
    return z_XC


def projection(heads: int = HEADS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(OUTPUTS, heads * WIDTH, generator=generator, dtype=torch.float64)
    return weight, torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)


def moments_of(z_XC: Tensor) -> tuple[Tensor, Tensor]:
    return z_XC.mean(0), z_XC.T @ z_XC / len(z_XC)


def fewer(z_XC: Tensor, map_MH: Tensor) -> Tensor:
    """What heads picked or averaged give, head by head."""
    by_head = z_XC.view(len(z_XC), -1, WIDTH)
    return torch.cat([sum(share * by_head[:, head] for head, share in enumerate(row)) for row in map_MH.tolist()], 1)


MAPS = {
    "picked": whole_heads.selection(torch.tensor([0, 2]), HEADS),
    "averaged": averages(torch.tensor([0, 1, 0, 1]), 2),
    "whole groups": torch.block_diag(torch.eye(2, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.float64)),
    "of each group": torch.block_diag(*[torch.full((1, 2), 0.5, dtype=torch.float64)] * 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
def test_the_affine_projection_is_least_squares_over_the_samples(name: str, kind: str) -> None:
    """With almost no ridge: the residual of lstsq with a constant beside the heads that are left."""
    z_XC, (weight, bias) = samples(kind), projection()
    got = whole_heads.recovered(*moments_of(z_XC), weight, bias, MAPS[name], "affine", ridge_rel=1e-13)
    y_XO, small_XK = z_XC @ weight.T + bias, fewer(z_XC, MAPS[name])
    with_one = torch.cat((small_XK, torch.ones(len(z_XC), 1, dtype=torch.float64)), 1)
    exact = with_one @ torch.linalg.lstsq(with_one, y_XO, driver="gelsd").solution
    best = float((exact - y_XO).square().sum(1).mean())
    found = float((small_XK @ got.weight_OK.T + got.bias_O - y_XO).square().sum(1).mean())
    scale = float(y_XO.square().sum(1).mean())
    assert found == pytest.approx(best, rel=1e-5, abs=1e-7 * scale)
    assert got.residual == pytest.approx(found, rel=1e-6, abs=1e-8 * scale)
    if kind == "random":
        torch.testing.assert_close(small_XK @ got.weight_OK.T + got.bias_O, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPS)
def test_grails_projection_is_ridge_regression_over_the_samples(name: str, kind: str) -> None:
    """Its equation as published, by stacked rows: roots of the ridge below the samples."""
    z_XC, (weight, bias) = samples(kind), projection()
    got = whole_heads.recovered(*moments_of(z_XC), weight, bias, MAPS[name], "gram", ridge_rel=1e-2)
    small_XK = fewer(z_XC, MAPS[name])
    ridge = 1e-2 * float(small_XK.square().mean())
    root = (ridge * len(z_XC)) ** 0.5 * torch.eye(small_XK.shape[1], dtype=torch.float64)
    target = torch.cat((z_XC @ weight.T, torch.zeros(len(root), OUTPUTS, dtype=torch.float64)))
    exact = torch.linalg.lstsq(torch.cat((small_XK, root)), target).solution
    torch.testing.assert_close(got.weight_OK, exact.T, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(got.bias_O, bias)
    assert got.ridge == pytest.approx(ridge)
    found = float((small_XK @ got.weight_OK.T - z_XC @ weight.T).square().sum(1).mean())
    assert got.residual == pytest.approx(found, rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_all_heads_are_the_projection_as_it_is(kind: str) -> None:
    z_XC, (weight, bias) = samples(kind), projection()
    whole = whole_heads.selection(torch.arange(HEADS), HEADS)
    for form in ("none", "affine"):
        got = whole_heads.recovered(*moments_of(z_XC), weight, bias, whole, form, ridge_rel=1e-2)
        torch.testing.assert_close(got.weight_OK, weight, rtol=0.0, atol=0.0)
        torch.testing.assert_close(got.bias_O, bias, rtol=0.0, atol=0.0)
        assert (got.residual, got.residual_uncompensated, got.r2) == (0.0, 0.0, 1.0)


def test_nothing_fitted_sums_the_columns_of_a_cluster() -> None:
    z_XC, (weight, _) = samples("random"), projection()
    got = whole_heads.recovered(*moments_of(z_XC), weight, None, MAPS["averaged"], "none", ridge_rel=1e-4)
    by_head = weight.view(OUTPUTS, HEADS, WIDTH)
    expected = torch.cat((by_head[:, 0] + by_head[:, 2], by_head[:, 1] + by_head[:, 3]), 1)
    torch.testing.assert_close(got.weight_OK, expected)
    found = (fewer(z_XC, MAPS["averaged"]) @ expected.T - z_XC @ weight.T).square().sum(1).mean()
    assert got.residual == pytest.approx(float(found), rel=1e-9)
    assert got.residual == pytest.approx(got.residual_uncompensated, rel=1e-12)


@pytest.mark.parametrize("form", ["gram", "affine"])
def test_heads_that_are_there_twice_are_recovered(form: whole_heads.Form) -> None:
    """The projection splits between a head and its copies; any ranking leaves one of each, and nothing is lost."""
    z_XC, (weight, bias) = samples("random", 2), projection(4)
    twice_XC = z_XC.view(-1, 2, WIDTH)[:, [0, 1, 0, 1]].flatten(1)
    mean, second = moments_of(twice_XC)
    order = whole_heads.eliminated(second - torch.outer(mean, mean), weight, 4, ridge_rel=1e-9).order_F
    kept = order[2:].sort().values
    assert sorted(int(head) % 2 for head in kept) == [0, 1]
    got = whole_heads.recovered(
        mean, second, weight, bias, whole_heads.selection(kept, 4), form, ridge_rel=1e-12
    )  # fmt: skip
    small = fewer(twice_XC, whole_heads.selection(kept, 4))
    torch.testing.assert_close(small @ got.weight_OK.T + got.bias_O, twice_XC @ weight.T + bias, rtol=1e-6, atol=1e-6)
    rows_HX = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[[0, 1, 0, 1]]
    clusters = averages(cluster_rows(rows_HX, 2, seed=0), 2)
    folded = whole_heads.recovered(mean, second, weight, bias, clusters, "affine", ridge_rel=1e-12)
    assert folded.residual_uncompensated == pytest.approx(0.0, abs=1e-9)
    assert folded.residual == pytest.approx(0.0, abs=1e-9)


def lost_without(z_XC: Tensor, weight: Tensor, kept: tuple[int, ...]) -> float:
    """The least that any refit over these heads loses."""
    map_MH = whole_heads.selection(torch.tensor(kept), weight.shape[1] // WIDTH)
    centred = z_XC - z_XC.mean(0)
    small, y = fewer(centred, map_MH), centred @ weight.T
    return float((small @ torch.linalg.lstsq(small, y, driver="gelsd").solution - y).square().sum(1).mean())


@pytest.mark.parametrize("kind", ["random", "singular"])
def test_each_elimination_is_the_cheapest_of_all(kind: str) -> None:
    """By a refit for every candidate; the first is the best set of all but one, too."""
    z_XC, (weight, _) = samples(kind), projection()
    mean, second = moments_of(z_XC)
    found = whole_heads.eliminated(second - torch.outer(mean, mean), weight, HEADS, ridge_rel=1e-11)
    left = tuple(range(HEADS))
    for pick, lost in zip(found.order_F.tolist()[:-1], found.error_F.tolist(), strict=False):
        costs = {head: lost_without(z_XC, weight, tuple(each for each in left if each != head)) for head in left}
        assert costs[pick] <= min(costs.values()) * (1.0 + 1e-6) + 1e-7
        left = tuple(each for each in left if each != pick)
        assert lost == pytest.approx(costs[pick], rel=1e-4, abs=1e-6)
    best = min(combinations(range(HEADS), HEADS - 1), key=lambda kept: lost_without(z_XC, weight, kept))
    if kind == "random":
        assert {int(found.order_F[0])} == {*range(HEADS)} - {*best}


def test_scores_are_those_of_every_head_alone() -> None:
    z_XC, (weight, _) = samples("random"), projection()
    _, second = moments_of(z_XC)
    energy = whole_heads.output_energy(second, weight, HEADS)
    size = whole_heads.magnitude(weight, HEADS)
    for head in range(HEADS):
        own = slice(head * WIDTH, (head + 1) * WIDTH)
        alone = (z_XC[:, own] @ weight[:, own].T).square().sum(1).mean()
        assert float(energy[head]) == pytest.approx(float(alone), rel=1e-10)
        assert float(size[head]) == pytest.approx(float(weight[:, own].square().sum()))


def test_groups_go_whole_or_lose_equally_many_heads() -> None:
    """Six query heads, two to a group of keys and values."""
    score = torch.tensor([5.0, 1.0, 4.0, 3.0, 0.5, 6.0], dtype=torch.float64)
    assert kept_from_scores(score, 3).tolist() == [0, 2, 5]
    z_XC, (weight, _) = samples("random", 6), projection(6)
    mean, second = moments_of(z_XC)
    covariance = second - torch.outer(mean, mean)
    whole = whole_heads.eliminated(covariance, weight, 3, ridge_rel=1e-11)
    costs = []
    for group in range(3):
        kept = tuple(head for head in range(6) if head // 2 != group)
        costs.append(lost_without(z_XC, weight, kept))
    assert int(whole.order_F[0]) == min(range(3), key=costs.__getitem__)
    assert float(whole.error_F[0]) == pytest.approx(min(costs), rel=1e-5)
