"""Scores, backward elimination and swaps, against plain computations on raw samples."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from corp_deploy.algebra import scores as select
from corp_deploy.algebra.block_obs import eliminate_coupled
from corp_deploy.algebra.obs import Elimination, obs
from corp_deploy.algebra.swap import swap
from tests.test_corp_patch_elimination import blocks_of, covariance_of, ridge_loss
from tests.test_corp_patch_elimination import greedy as explicit_greedy

Array = NDArray[np.floating[Any]]


def layer(channels: int, outputs: int, tokens: int, *, seed: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Samples [tokens, F] of GELU features that share a low-dimensional input, and output weights [O, F]."""
    generator = torch.Generator().manual_seed(seed)
    inner = rank or max(2, channels // 3)
    mix = torch.randn(inner, channels, generator=generator, dtype=torch.float64) / inner**0.5
    hidden = torch.randn(tokens, inner, generator=generator, dtype=torch.float64) @ mix + 0.2
    weight = torch.randn(outputs, channels, generator=generator, dtype=torch.float64)
    return torch.nn.functional.gelu(hidden), weight


def test_scores_of_rows_are_their_formulas() -> None:
    w = layer(11, 5, 300)[1].numpy()
    first = torch.from_numpy(w.T.copy())  # any rows will do
    np.testing.assert_allclose(select.producer(first, 1), [sum(abs(v) for v in row) for row in w.T], rtol=1e-12)
    np.testing.assert_allclose(select.producer(first, 2), [sum(v**2 for v in row) ** 0.5 for row in w.T], rtol=1e-12)
    rows = torch.from_numpy(w.reshape(1, 5, 11))
    expected = [[4.0 * sum(v**2 for v in row) ** 2 for row in w]]
    np.testing.assert_allclose(select.logit_magnitude(rows, 2.0 * rows), expected, rtol=1e-12)


def test_logit_energy_is_the_mean_over_images() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 4, 3, 7, 5, generator=generator, dtype=torch.float64)  # [images, heads, tokens, dims]
    expected = (q.square().sum(2) * k.square().sum(2)).mean(0)
    torch.testing.assert_close(select.logit_energy(expected * 4, 4), expected)


def test_kept_is_sorted_and_ties_go_to_the_lower_index() -> None:
    score = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    kept = select.kept_from_scores(score, 3)
    assert (kept.dtype, kept.tolist()) == (torch.int64, [[1, 2, 3], [0, 1, 2]])
    with pytest.raises(AssertionError):
        select.kept_from_scores(score, 0)
    with pytest.raises(AssertionError):
        select.kept_from_scores(score, 6)


def test_obs_takes_the_channel_whose_loss_is_least_at_every_step() -> None:
    samples, weight = layer(9, 4, 200)
    cov = covariance_of(samples)
    ridge = 1e-3 * float(cov.diagonal().mean())
    result = obs(cov, weight, ridge_rel=1e-3)
    assert result.ridge == pytest.approx(ridge)
    left = list(range(9))
    for removed, error in zip(result.order_F.tolist(), result.error_F.tolist(), strict=True):
        losses = {j: ridge_loss(cov, weight, [i for i in left if i != j], ridge) for j in left}
        assert removed == min(losses, key=lambda j: losses[j])
        assert error == pytest.approx(losses[removed], rel=1e-9)
        left.remove(removed)


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(("tokens", "rank"), [(2000, None), (40, None), (500, 5)])
def test_obs_equals_plain_greedy(block: int, tokens: int, rank: int | None) -> None:
    """Full rank, fewer samples than channels, and a nearly flat input: the same kept sets at every width."""
    samples, weight = layer(150, 20, tokens, seed=tokens, rank=rank)
    cov = covariance_of(samples)
    result = obs(cov, weight, ridge_rel=1e-4, block=block)
    assert result.order_F.tolist() == explicit_greedy(cov, weight, blocks_of(150, 1), result.ridge)


def test_constant_and_unread_channels_go_first_for_nothing() -> None:
    samples, weight = layer(30, 6, 400)
    samples[:, 7], samples[:, 21] = 3.5, 0.0
    weight[:, 12] = 0.0
    result = obs(covariance_of(samples), weight, ridge_rel=1e-4)
    assert result.order_F[:3].tolist() == [7, 12, 21]
    assert result.error_at(27) == 0.0
    assert result.error_at(26) > 0.0
    assert sorted(result.order_F.tolist()) == list(range(30))


@pytest.mark.parametrize("ridge_rel", [0.0, 1e-12, 1e-4])
def test_singular_covariance_is_eliminated_down_to_its_rank_for_next_to_nothing(ridge_rel: float) -> None:
    generator = torch.Generator().manual_seed(5)
    source = torch.randn(300, 8, generator=generator, dtype=torch.float64)
    samples = source @ torch.randn(8, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 32, generator=generator, dtype=torch.float64)
    result = obs(covariance_of(samples), weight, ridge_rel=ridge_rel)
    assert bool(torch.isfinite(result.error_F).all())
    assert result.error_at(8) < 1e-3 * result.error_at(0)
    assert result.error_at(7) > result.error_at(8)


def test_nothing_varies_at_all() -> None:
    result = obs(torch.zeros(5, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64), ridge_rel=1e-4)
    assert result.order_F.tolist() == [0, 1, 2, 3, 4]
    assert result.error_at(1) == 0.0
    unmoved = swap(
        torch.zeros(5, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64), result.kept(2), ridge_rel=1e-4
    )
    assert (unmoved.kept_K.tolist(), unmoved.swaps) == ([3, 4], 0)


def test_full_width_has_nothing_to_exchange() -> None:
    samples, weight = layer(10, 3, 90)
    result = swap(covariance_of(samples), weight, torch.arange(10), ridge_rel=1e-4)
    assert (result.kept_K.tolist(), result.swaps, result.error) == (list(range(10)), 0, 0.0)


def test_elimination_refuses_impossible_widths() -> None:
    result = Elimination(order_F=torch.tensor([1, 0]), error_F=torch.tensor([0.0, 1.0]), ridge=0.0)
    assert result.kept(1).tolist() == [0]
    assert result.kept(0).tolist() == []  # a constant is left
    for width in (-1, 3):
        with pytest.raises(AssertionError):
            result.kept(width)
    with pytest.raises(AssertionError):
        result.error_at(3)


@given(seed=st.integers(0, 10_000), width=st.integers(2, 10))
@settings(max_examples=25, deadline=None)
def test_swap_ends_where_no_exchange_helps_and_knows_its_loss(seed: int, width: int) -> None:
    samples, weight = layer(12, 3, 60, seed=seed)
    cov = covariance_of(samples)
    ridge = 1e-3 * float(cov.diagonal().mean())
    start = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:width].sort().values
    result = swap(cov, weight, start, ridge_rel=1e-3, gain_rel=1e-6)
    kept = result.kept_K.tolist()
    assert (kept, len(kept)) == (sorted(set(kept)), width)
    assert result.error_before == pytest.approx(ridge_loss(cov, weight, start.tolist(), ridge), rel=1e-7)
    assert result.error == pytest.approx(ridge_loss(cov, weight, kept, ridge), rel=1e-7)
    for out, new in itertools.product(kept, set(range(12)) - set(kept)):
        exchanged = [j for j in kept if j != out] + [new]
        assert ridge_loss(cov, weight, exchanged, ridge) >= result.error * (1.0 - 2e-6)


def test_swap_undoes_a_bad_choice_and_leaves_dead_channels_out() -> None:
    samples, weight = layer(60, 8, 800)
    samples[:, :3] = 1.0
    cov = covariance_of(samples)
    best = obs(cov, weight, ridge_rel=1e-4).kept(20)
    worst = obs(cov, weight, ridge_rel=1e-4).order_F[3:23].sort().values
    result = swap(cov, weight, worst, ridge_rel=1e-4)
    ridge = 1e-4 * float(cov.diagonal().mean())
    assert result.swaps > 5
    assert result.error < 1.1 * ridge_loss(cov, weight, best.tolist(), ridge)
    assert not set(result.kept_K.tolist()) & {0, 1, 2}
    assert result.error == pytest.approx(ridge_loss(cov, weight, result.kept_K.tolist(), ridge), rel=1e-7)


# Elimination of channels that several layers read, over all of them.


def greedy(
    covariances: list[Tensor], weights: list[Tensor], ridge_rel: float, taps: list[int], parts: list[int]
) -> tuple[list[int], list[float]]:
    """Every candidate solved anew at every step; errors against all the channels, as shares of each reader's. In turns
    one of every part.
    """
    left, order, errors = list(range(len(parts))), list[int](), list[float]()

    def lost(channels: list[int]) -> float:
        total = 0.0
        for covariance, weight, size in zip(covariances, weights, taps, strict=True):
            kept = [channel * size + place for channel in channels for place in range(size)]
            shifted = covariance + ridge_rel * covariance.diagonal().mean() * torch.eye(len(covariance)).double()
            best = torch.zeros_like(weight)
            if kept:
                best[:, kept] = torch.linalg.solve(shifted[kept][:, kept], shifted[kept] @ weight.T).T
            change = weight - best
            total += float(((change @ shifted) * change).sum() / ((weight @ covariance) * weight).sum())
        return total

    count = len(set(parts))
    while left:
        turn = order[len(order) // count * count :]
        offered = [out for out in left if parts[out] not in [parts[each] for each in turn]]
        costs = [lost([each for each in left if each != out]) for out in offered]
        errors.append(min(costs))
        order.append(offered[costs.index(min(costs))])
        left.remove(order[-1])
    return order, errors


@pytest.mark.parametrize(
    ("seed", "taps", "parts"),
    [
        (0, [1, 1, 1], [0] * 9),
        (1, [1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (2, [2, 1, 2], [0] * 9),
        (3, [3, 1, 2], [0, 1, 2] * 3),
    ],
)
def test_elimination_is_greedy_over_all_readers(seed: int, taps: list[int], parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mixings = [drawn(9 * size, 9 * size) for size in taps]
    covariances = [mixing @ mixing.T for mixing in mixings]
    weights = [drawn(rows, 9 * size) for rows, size in zip((4, 7, 2), taps, strict=True)]
    order, errors = greedy(covariances, weights, 1e-6, taps, parts)
    eliminated = eliminate_coupled(covariances, weights, ridge_rel=1e-6, taps=taps, part_C=torch.tensor(parts))
    assert eliminated.order_F.tolist() == order
    assert torch.allclose(eliminated.error_F, torch.tensor(errors, dtype=torch.float64), rtol=1e-6)


def test_a_channel_that_others_are_made_of_goes_first() -> None:
    """Of singular statistics: the copy costs nothing where every reader sees it as one."""
    base = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_NC = torch.cat([base, 2.0 * base[:, :2]], dim=1)
    weights = [torch.randn(3, 8, generator=torch.Generator().manual_seed(each)).double() for each in (1, 2)]
    covariance = torch.cov(x_NC.T, correction=0)
    eliminated = eliminate_coupled([covariance, 3.0 * covariance], weights, ridge_rel=1e-9)
    assert float(eliminated.error_F[1]) < 1e-6 < 1e-3 < float(eliminated.error_F[2])


def test_readers_that_nothing_reaches_have_no_say() -> None:
    covariance = torch.eye(4, dtype=torch.float64)
    weight = torch.diag(torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64))
    silent = torch.zeros(4, 4, dtype=torch.float64)
    both = eliminate_coupled([silent, covariance], [weight.flip(0), weight], ridge_rel=1e-4)
    assert both.order_F.tolist() == [1, 2, 0, 3]
    nothing = eliminate_coupled([silent], [weight], ridge_rel=1e-4)
    assert nothing.order_F.tolist() == [0, 1, 2, 3]
    assert float(nothing.error_F.abs().max()) == 0.0
