"""Elimination of a convolution's channels against explicit inverses and least squares at every step."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from corp_deploy.algebra.block_obs import eliminate_blocks
from corp_deploy.algebra.obs import Elimination, interleaved, obs

Array = NDArray[np.floating[Any]]
Blocks = list[list[int]]


def patches_of(channels: int, taps: int, places: int, *, seed: int = 0, rank: int | None = None) -> Tensor:
    """[places, C T]: positive columns that share a low-dimensional input."""
    generator = torch.Generator().manual_seed(seed)
    rank = rank or channels * taps // 2 + 1
    mix = torch.randn(rank, channels * taps, generator=generator, dtype=torch.float64) / rank**0.5
    inputs = torch.randn(places, rank, generator=generator, dtype=torch.float64)
    return torch.relu(inputs @ mix + 0.3)


def weight_of(outputs: int, width: int, *, seed: int = 1) -> Tensor:
    return torch.randn(outputs, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance_of(u: Tensor) -> Tensor:
    centred = u - u.mean(dim=0)
    return centred.T @ centred / u.shape[0]


def ridge_loss(cov: Tensor, weight: Tensor, kept: list[int], ridge: float) -> float:
    """The least of tr((W - W') A (W - W')') over W' on these columns: by lstsq on a root of A, A = cov + ridge I."""
    values, vectors = np.linalg.eigh(cov.numpy() + ridge * np.eye(len(cov)))
    root: Array = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    target = root @ weight.numpy().T
    fitted = root[:, kept] @ np.linalg.lstsq(root[:, kept], target, rcond=None)[0] if kept else 0.0 * target
    return float(np.square(target - fitted).sum())


def greedy(cov: Tensor, weight: Tensor, blocks: Blocks, ridge: float, group: list[int] | None = None) -> list[int]:
    """Textbook: at every step the inverse over what is left, and the loss that each removal would leave."""
    a: Array = cov.numpy() + ridge * np.eye(len(cov))
    w: Array = weight.numpy()
    group = group or [0] * len(blocks)
    order: list[int] = []
    left = set(range(len(blocks)))
    done: set[int] = set()
    while left:
        costs: dict[int, float] = {}
        here = [column for block in sorted(left) for column in blocks[block]]
        inverse = np.linalg.inv(a[np.ix_(here, here)])
        best = w @ a[:, here] @ inverse
        for block in sorted(left):
            if group[block] not in done:
                at = [here.index(column) for column in blocks[block]]
                costs[block] = float(np.trace(best[:, at] @ np.linalg.inv(inverse[np.ix_(at, at)]) @ best[:, at].T))
        order.append(min(costs, key=lambda block: costs[block]))
        left.remove(order[-1])
        done.add(group[order[-1]])
        if len(done) == len(set(group)):
            done = set()
    return order


def blocks_of(channels: int, taps: int) -> Blocks:
    return [list(range(channel * taps, (channel + 1) * taps)) for channel in range(channels)]


def assert_errors(result: Elimination, cov: Tensor, weight: Tensor, taps: int, *, every: int = 1) -> None:
    """At every `every`-th removal the error is the ridge objective of the set kept there."""
    total = result.order_F.numel()
    whole = ridge_loss(cov, weight, [], result.ridge)
    assert sorted(result.order_F.tolist()) == list(range(total))
    for width in range(0, total, every):
        kept = [channel * taps + tap for channel in result.kept(width).tolist() for tap in range(taps)]
        expected = ridge_loss(cov, weight, kept, result.ridge)
        assert result.error_at(width) == pytest.approx(expected, rel=1e-6, abs=1e-9 * whole)


@pytest.mark.parametrize(("channels", "taps", "places", "rank"), [(8, 4, 300, None), (12, 9, 60, None), (9, 4, 300, 5)])
@pytest.mark.parametrize("outputs", [2, 10])
def test_every_step_is_that_of_explicit_inverses(
    channels: int, taps: int, places: int, rank: int | None, outputs: int
) -> None:
    """Full rank, fewer places than columns, and a nearly flat input; few outputs and many."""
    u, weight = patches_of(channels, taps, places, rank=rank), weight_of(outputs, channels * taps)
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, taps, ridge_rel=1e-3)
    assert result.ridge == pytest.approx(1e-3 * float(cov.diagonal().mean()))
    assert result.order_F.tolist() == greedy(cov, weight, blocks_of(channels, taps), result.ridge)
    assert_errors(result, cov, weight, taps)


def test_many_removals_between_two_formings() -> None:
    """Wide enough for late removals to be applied, matrices to shrink and to be formed anew, several times."""
    u, weight = patches_of(72, 4, 2000, seed=2), weight_of(6, 288)
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, 4, ridge_rel=1e-4)
    assert result.order_F.tolist() == greedy(cov, weight, blocks_of(72, 4), result.ridge)
    assert_errors(result, cov, weight, 4, every=9)


def test_one_tap_is_obs() -> None:
    u, weight = patches_of(60, 1, 500), weight_of(5, 60)
    cov = covariance_of(u)
    alone = obs(cov, weight, ridge_rel=1e-3)
    blocks = eliminate_blocks(cov, weight, 1, ridge_rel=1e-3, group_of_C=torch.zeros(60, dtype=torch.int64))
    assert torch.equal(blocks.order_F, alone.order_F)
    torch.testing.assert_close(blocks.error_F, alone.error_F)


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("places", [20, 400])
def test_groups_lose_a_channel_each_in_every_round(taps: int, places: int) -> None:
    u, weight = patches_of(12, taps, places, seed=3), weight_of(5, 12 * taps)
    group = [0, 1, 2, 2, 1, 0, 0, 1, 2, 0, 1, 2]
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, taps, ridge_rel=1e-3, group_of_C=torch.tensor(group))
    assert result.order_F.tolist() == greedy(cov, weight, blocks_of(12, taps), result.ridge, group)
    assert result.order_F.tolist() != eliminate_blocks(cov, weight, taps, ridge_rel=1e-3).order_F.tolist()
    assert_errors(result, cov, weight, taps)
    for width in (3, 6, 9):
        kept = result.kept(width).tolist()
        assert sorted(group[channel] for channel in kept) == sorted([0, 1, 2] * (width // 3))


def test_groups_of_unlike_sizes_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"\[1, 3\]"):
        eliminate_blocks(torch.eye(4), weight_of(2, 4), 1, ridge_rel=1e-3, group_of_C=torch.tensor([0, 0, 1, 0]))


def test_separate_eliminations_are_joined_round_by_round() -> None:
    """A convolution in groups: its covariance and its weights are block diagonal."""
    parts = [(covariance_of(patches_of(5, 4, 300, seed=seed)), weight_of(3, 20, seed=seed)) for seed in (6, 7, 8)]
    alone = [eliminate_blocks(cov, weight, 4, ridge_rel=1e-3) for cov, weight in parts]
    result = interleaved(alone)
    assert sorted(result.order_F.tolist()) == list(range(15))
    for r in range(5):
        expected = [5 * group + int(each.order_F[r]) for group, each in enumerate(alone)]
        assert result.order_F[3 * r : 3 * r + 3].tolist() == expected
        error = sum(float(each.error_F[r]) for each in alone)
        assert result.error_at(12 - 3 * r) == pytest.approx(error, rel=1e-12)
    assert result.error_at(14) == pytest.approx(float(alone[0].error_F[0]))
    assert result.ridge == max(each.ridge for each in alone)


@pytest.mark.parametrize("taps", [1, 4])
def test_dead_channels_leave_first_by_index_and_cost_nothing(taps: int) -> None:
    """Constants, and channels that nothing reads; in rounds they are the first of their groups."""
    u, weight = patches_of(8, taps, 300, seed=10), weight_of(3, 8 * taps)
    weight[:, 5 * taps : 6 * taps] = 0.0
    u[:, 2 * taps : 3 * taps] = 0.7
    u[:, 6 * taps : 7 * taps] = 0.0
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, taps, ridge_rel=1e-2)
    assert result.order_F[:3].tolist() == [2, 5, 6]
    assert result.error_F[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.error_F[3] > 0.0
    rounds = eliminate_blocks(cov, weight, taps, ridge_rel=1e-2, group_of_C=torch.tensor([0, 0, 0, 1, 1, 1, 0, 1]))
    assert rounds.order_F[:2].tolist() == [2, 5]
    assert rounds.order_F[2] == 6
    assert rounds.error_F[2] == 0.0


def test_a_tap_that_never_sees_the_map_costs_nothing() -> None:
    """A map of one place under a kernel of nine: eight columns of every channel are always zero."""
    x = patches_of(6, 1, 300, seed=11)
    u = torch.zeros(300, 6, 9, dtype=torch.float64)
    u[:, :, 4] = x
    weight = weight_of(4, 54)
    result = eliminate_blocks(covariance_of(u.flatten(1)), weight, 9, ridge_rel=9e-3)
    alone = obs(covariance_of(x), weight.view(4, 6, 9)[:, :, 4], ridge_rel=1e-3)
    assert torch.equal(result.order_F, alone.order_F)
    torch.testing.assert_close(result.error_F, alone.error_F)


def test_where_nothing_varies_channels_leave_in_rounds_at_no_cost() -> None:
    zeros, weight = torch.zeros(16, 16, dtype=torch.float64), weight_of(2, 16)
    result = eliminate_blocks(zeros, weight, 4, ridge_rel=1e-3)
    assert (result.order_F.tolist(), result.error_F.tolist(), result.ridge) == ([0, 1, 2, 3], [0.0] * 4, 0.0)
    result = eliminate_blocks(zeros, weight, 4, ridge_rel=1e-3, group_of_C=torch.tensor([1, 1, 0, 0]))
    assert result.order_F.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("places", [30, 1000])
def test_singular_patches_with_next_to_no_ridge(places: int) -> None:
    """More columns than places, and a ridge at the floor: only matrices formed anew keep the errors right."""
    u, weight = patches_of(40, 9, places, seed=12, rank=36), weight_of(8, 360)
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, 9, ridge_rel=0.0)
    whole = ridge_loss(cov, weight, [], 0.0)
    assert result.error_at(0) == pytest.approx(whole, rel=5e-7)
    assert bool((result.error_F.diff() >= 0.0).all())
    for width in (4, 10, 20, 30):
        kept = [channel * 9 + tap for channel in result.kept(width).tolist() for tap in range(9)]
        expected = ridge_loss(cov, weight, kept, result.ridge)
        assert result.error_at(width) == pytest.approx(expected, rel=1e-3, abs=1e-6 * whole)
