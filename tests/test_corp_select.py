"""Scores, backward elimination and swaps of channels, compared with plain computations on samples."""

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
from corp_deploy.algebra.block_obs import eliminate_blocks, eliminate_coupled
from corp_deploy.algebra.obs import Elimination, interleave, obs
from corp_deploy.algebra.swap import swap


def layer(channels: int, outputs: int, tokens: int, *, seed: int = 0, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Draw samples [tokens, F] of GELU features that share a low-dimensional input, and output weights [O, F]."""
    generator = torch.Generator().manual_seed(seed)
    inner = rank or max(2, channels // 3)
    mix = torch.randn(inner, channels, generator=generator, dtype=torch.float64) / inner**0.5
    hidden = torch.randn(tokens, inner, generator=generator, dtype=torch.float64) @ mix + 0.2
    weight = torch.randn(outputs, channels, generator=generator, dtype=torch.float64)
    return torch.nn.functional.gelu(hidden), weight


def test_row_scores_equal_their_formulas() -> None:
    w = layer(11, 5, 300)[1].numpy()
    first = torch.from_numpy(w.T.copy())
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
    for width in (0, 6):
        with pytest.raises(AssertionError):
            select.kept_from_scores(score, width)


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize(("tokens", "rank"), [(2000, None), (40, None), (500, 5)])
def test_obs_equals_plain_greedy(block: int, tokens: int, rank: int | None) -> None:
    """The order and errors are equal at full rank, with fewer samples than channels, and with rank 5."""
    samples, weight = layer(80, 20, tokens, seed=tokens, rank=rank)
    cov = covariance_of(samples)
    result = obs(cov, weight, ridge_rel=1e-4, block=block)
    assert result.ridge == pytest.approx(1e-4 * float(cov.diagonal().mean()))
    assert result.order_F.tolist() == greedy(cov, weight, blocks_of(80, 1), result.ridge)
    assert_errors(result, cov, weight, 1, every=16)


def test_constant_and_unread_channels_are_removed_first_without_loss() -> None:
    samples, weight = layer(30, 6, 400)
    samples[:, 7], samples[:, 21] = 3.5, 0.0
    weight[:, 12] = 0.0
    result = obs(covariance_of(samples), weight, ridge_rel=1e-4)
    assert result.order_F[:3].tolist() == [7, 12, 21]
    assert result.error_at(27) == 0.0
    assert result.error_at(26) > 0.0
    assert sorted(result.order_F.tolist()) == list(range(30))


@pytest.mark.parametrize("ridge_rel", [0.0, 1e-12, 1e-4])
def test_singular_covariance_is_eliminated_to_its_rank_almost_without_loss(ridge_rel: float) -> None:
    generator = torch.Generator().manual_seed(5)
    source = torch.randn(300, 8, generator=generator, dtype=torch.float64)
    samples = source @ torch.randn(8, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 32, generator=generator, dtype=torch.float64)
    result = obs(covariance_of(samples), weight, ridge_rel=ridge_rel)
    assert bool(torch.isfinite(result.error_F).all())
    assert result.error_at(8) < 1e-3 * result.error_at(0)
    assert result.error_at(7) > result.error_at(8)


def test_constant_inputs_and_full_width_are_handled() -> None:
    nothing, ones = torch.zeros(5, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    result = obs(nothing, ones, ridge_rel=1e-4)
    assert result.order_F.tolist() == [0, 1, 2, 3, 4]
    assert result.error_at(1) == 0.0
    assert swap(nothing, ones, result.kept(2), ridge_rel=1e-4).tolist() == [3, 4]
    assert swap(torch.eye(5, dtype=torch.float64), ones, torch.arange(5), ridge_rel=1e-4).tolist() == [0, 1, 2, 3, 4]


def test_elimination_refuses_impossible_widths() -> None:
    result = Elimination(order_F=torch.tensor([1, 0]), error_F=torch.tensor([0.0, 1.0]), ridge=0.0)
    assert result.kept(1).tolist() == [0]
    assert result.kept(0).tolist() == []
    for call, width in ((result.kept, -1), (result.kept, 3), (result.error_at, 3)):
        with pytest.raises(AssertionError):
            call(width)


@given(seed=st.integers(0, 10_000), width=st.integers(2, 10))
@settings(max_examples=25, deadline=None)
def test_swap_ends_at_a_local_optimum(seed: int, width: int) -> None:
    samples, weight = layer(12, 3, 60, seed=seed)
    cov = covariance_of(samples)
    ridge = 1e-3 * float(cov.diagonal().mean())
    start = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:width].sort().values
    kept = swap(cov, weight, start, ridge_rel=1e-3).tolist()
    assert (kept, len(kept)) == (sorted(set(kept)), width)
    loss = ridge_loss(cov, weight, kept, ridge)
    assert loss <= ridge_loss(cov, weight, start.tolist(), ridge)
    for out, new in itertools.product(kept, set(range(12)) - set(kept)):
        exchanged = [j for j in kept if j != out] + [new]
        assert ridge_loss(cov, weight, exchanged, ridge) >= loss * (1.0 - 1.001e-5)


def test_swap_depends_on_no_scale_and_ends_on_redundant_channels() -> None:
    """Activations of 1e-8 give covariances of 1e-16; of 96 channels only 24 are independent but for rounding."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(500, 24, generator=generator) @ torch.randn(24, 96, generator=generator)
    samples = (mixed + 1e-7 * torch.randn(500, 96, generator=generator)).double()
    weight = torch.randn(16, 96, generator=generator).double()
    start = torch.randperm(96, generator=generator)[:48].sort().values
    cov = covariance_of(samples)
    ridge = 1e-4 * float(cov.diagonal().mean())
    plain = swap(cov, weight, start, ridge_rel=1e-4).tolist()
    assert len(set(plain) - set(start.tolist())) > 5
    assert ridge_loss(cov, weight, plain, ridge) < ridge_loss(cov, weight, start.tolist(), ridge)
    for scale in (1e-8, 1e-4, 1e8):
        assert swap(covariance_of(scale * samples), weight / scale, start, ridge_rel=1e-4).tolist() == plain
    nearly_singular = swap(cov, weight, start, ridge_rel=1e-12)
    assert len(nearly_singular.unique()) == len(start)


def test_swap_corrects_a_bad_choice_and_excludes_dead_channels() -> None:
    samples, weight = layer(60, 8, 800)
    samples[:, :3] = 1.0
    cov = covariance_of(samples)
    best = obs(cov, weight, ridge_rel=1e-4).kept(20)
    worst = obs(cov, weight, ridge_rel=1e-4).order_F[3:23].sort().values
    kept = swap(cov, weight, worst, ridge_rel=1e-4).tolist()
    ridge = 1e-4 * float(cov.diagonal().mean())
    assert len(set(kept) - set(worst.tolist())) > 5
    assert ridge_loss(cov, weight, kept, ridge) < 1.1 * ridge_loss(cov, weight, best.tolist(), ridge)
    assert not set(kept) & {0, 1, 2}


# Elimination of channels that several layers read


def greedy_over_readers(
    covariances: list[Tensor], weights: list[Tensor], ridge_rel: float, taps: list[int], parts: list[int]
) -> tuple[list[int], list[float]]:
    """Eliminate greedily with a new solution for every candidate, and return the order and errors.

    Errors are relative to each reader's output on all channels. Each turn removes one channel of every part.
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
    order, errors = greedy_over_readers(covariances, weights, 1e-6, taps, parts)
    eliminated = eliminate_coupled(covariances, weights, ridge_rel=1e-6, taps=taps, part_C=torch.tensor(parts))
    assert eliminated.order_F.tolist() == order
    assert torch.allclose(eliminated.error_F, torch.tensor(errors, dtype=torch.float64), rtol=1e-6)


def test_redundant_channel_is_removed_first() -> None:
    """Two channels copy others for every reader, so the statistics are singular and their removal costs nothing."""
    base = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_NC = torch.cat([base, 2.0 * base[:, :2]], dim=1)
    weights = [torch.randn(3, 8, generator=torch.Generator().manual_seed(each)).double() for each in (1, 2)]
    covariance = torch.cov(x_NC.T, correction=0)
    eliminated = eliminate_coupled([covariance, 3.0 * covariance], weights, ridge_rel=1e-9)
    assert float(eliminated.error_F[1]) < 1e-6 < 1e-3 < float(eliminated.error_F[2])


def test_readers_with_zero_inputs_are_ignored() -> None:
    covariance = torch.eye(4, dtype=torch.float64)
    weight = torch.diag(torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64))
    silent = torch.zeros(4, 4, dtype=torch.float64)
    both = eliminate_coupled([silent, covariance], [weight.flip(0), weight], ridge_rel=1e-4)
    assert both.order_F.tolist() == [1, 2, 0, 3]
    nothing = eliminate_coupled([silent], [weight], ridge_rel=1e-4)
    assert nothing.order_F.tolist() == [0, 1, 2, 3]
    assert float(nothing.error_F.abs().max()) == 0.0


# Elimination of a convolution's channels, compared with inverses and least squares at every step

Array = NDArray[np.floating[Any]]
Blocks = list[list[int]]


def patches_of(channels: int, taps: int, places: int, *, seed: int = 0, rank: int | None = None) -> Tensor:
    """Draw patches [places, C T] with positive columns that share a low-dimensional input."""
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
    """Minimise tr((W - W') A (W - W')') over W' on the kept columns, A = cov + ridge I, by lstsq on a root of A."""
    values, vectors = np.linalg.eigh(cov.numpy() + ridge * np.eye(len(cov)))
    root: Array = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
    target = root @ weight.numpy().T
    fitted = root[:, kept] @ np.linalg.lstsq(root[:, kept], target, rcond=None)[0] if kept else 0.0 * target
    return float(np.square(target - fitted).sum())


def greedy(cov: Tensor, weight: Tensor, blocks: Blocks, ridge: float, group: list[int] | None = None) -> list[int]:
    """Eliminate blocks greedily, with a new inverse over the remaining columns at every step."""
    a: Array = cov.numpy() + ridge * np.eye(len(cov))
    w: Array = weight.numpy()
    group = group or [0] * len(blocks)
    order, left, done = list[int](), set(range(len(blocks))), set[int]()
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
    """Require that the error is the kept set's ridge objective, at every `every`-th width."""
    total = result.order_F.numel()
    whole = ridge_loss(cov, weight, [], result.ridge)
    assert sorted(result.order_F.tolist()) == list(range(total))
    for width in range(0, total, every):
        kept = [channel * taps + tap for channel in result.kept(width).tolist() for tap in range(taps)]
        expected = ridge_loss(cov, weight, kept, result.ridge)
        assert result.error_at(width) == pytest.approx(expected, rel=1e-6, abs=1e-9 * whole)


@pytest.mark.parametrize(
    ("channels", "taps", "places", "rank", "outputs"),
    [
        *((8, 4, 300, None, outputs) for outputs in (2, 10)),
        *((12, 9, 60, None, outputs) for outputs in (2, 10)),
        *((9, 4, 300, 5, outputs) for outputs in (2, 10)),
        (72, 4, 2000, None, 6),  # wide enough to delay removals, and to shrink and rebuild matrices several times
    ],
)
def test_every_step_equals_explicit_inverses(
    channels: int, taps: int, places: int, rank: int | None, outputs: int
) -> None:
    """Patches have full rank, fewer places than columns, or rank 5, and outputs are few or many."""
    u, weight = patches_of(channels, taps, places, rank=rank), weight_of(outputs, channels * taps)
    cov = covariance_of(u)
    result = eliminate_blocks(cov, weight, taps, ridge_rel=1e-4)
    assert result.ridge == pytest.approx(1e-4 * float(cov.diagonal().mean()))
    assert result.order_F.tolist() == greedy(cov, weight, blocks_of(channels, taps), result.ridge)
    assert_errors(result, cov, weight, taps, every=max(1, channels // 8))


def test_one_by_one_convolution_equals_obs() -> None:
    u, weight = patches_of(60, 1, 500), weight_of(5, 60)
    cov = covariance_of(u)
    alone = obs(cov, weight, ridge_rel=1e-3)
    blocks = eliminate_blocks(cov, weight, 1, ridge_rel=1e-3, group_of_C=torch.zeros(60, dtype=torch.int64))
    assert torch.equal(blocks.order_F, alone.order_F)
    torch.testing.assert_close(blocks.error_F, alone.error_F)


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("places", [20, 400])
def test_every_group_loses_one_channel_per_round(taps: int, places: int) -> None:
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


def test_grouped_elimination_joins_separate_ones_by_round() -> None:
    """The covariance and weights of a grouped convolution are block diagonal."""
    parts = [(covariance_of(patches_of(5, 4, 300, seed=seed)), weight_of(3, 20, seed=seed)) for seed in (6, 7, 8)]
    alone = [eliminate_blocks(cov, weight, 4, ridge_rel=1e-3) for cov, weight in parts]
    result = interleave(alone)
    assert sorted(result.order_F.tolist()) == list(range(15))
    for r in range(5):
        expected = [5 * group + int(each.order_F[r]) for group, each in enumerate(alone)]
        assert result.order_F[3 * r : 3 * r + 3].tolist() == expected
        error = sum(float(each.error_F[r]) for each in alone)
        assert result.error_at(12 - 3 * r) == pytest.approx(error, rel=1e-12)
    assert result.error_at(14) == pytest.approx(float(alone[0].error_F[0]))
    assert result.ridge == max(each.ridge for each in alone)


@pytest.mark.parametrize("taps", [1, 4])
def test_dead_channels_are_removed_first_by_index_without_loss(taps: int) -> None:
    """Constant and unread channels are dead; in rounds they are the first of their groups."""
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


def test_constant_channels_are_removed_in_rounds_without_loss() -> None:
    zeros, weight = torch.zeros(16, 16, dtype=torch.float64), weight_of(2, 16)
    result = eliminate_blocks(zeros, weight, 4, ridge_rel=1e-3)
    assert (result.order_F.tolist(), result.error_F.tolist(), result.ridge) == ([0, 1, 2, 3], [0.0] * 4, 0.0)
    result = eliminate_blocks(zeros, weight, 4, ridge_rel=1e-3, group_of_C=torch.tensor([1, 1, 0, 0]))
    assert result.order_F.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("places", [30, 1000])
def test_singular_patches_with_a_minimal_ridge_stay_accurate(places: int) -> None:
    """At the smallest ridge only rebuilt matrices keep the errors right."""
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
