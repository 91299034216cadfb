"""Elimination of channels that several layers read, over all of them."""

import pytest
import torch
from torch import Tensor

from corp_deploy.algebra.coupled import eliminate_coupled


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
