"""Merging channels: the clustering and the recovery on merged channels, against loops and least squares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corp_deploy.algebra.fold import Folding, cluster_rows, fold


def merged(x: Tensor, folding: Folding) -> Tensor:
    """[tokens, K]: the mean activation of every cluster, by a loop."""
    clusters = range(int(folding.cluster_F.max()) + 1)
    return torch.stack([x[:, folding.cluster_F == cluster].mean(dim=1) for cluster in clusters], dim=1)


def layer(seed: int, channels: int = 12) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(channels, 4, generator=generator, dtype=torch.float64)
    shift = torch.randn(channels, generator=generator, dtype=torch.float64)
    inputs = torch.randn(150, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, channels, generator=generator, dtype=torch.float64)
    bias = torch.randn(3, generator=generator, dtype=torch.float64)
    return first, shift, torch.nn.functional.gelu(inputs @ first.T + shift), weight, bias


def test_planted_clusters_are_found_and_numbered_by_their_lowest_channel() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 10.0 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    truth = torch.tensor([0, 1, 0, 2, 3, 1, 2, 2, 3, 0])
    rows = centres[truth] + 0.01 * torch.randn(10, 6, generator=generator, dtype=torch.float64)
    for seed in range(5):
        assert cluster_rows(rows, 4, seed=seed).tolist() == truth.tolist()


@given(seed=st.integers(0, 10_000), width=st.integers(1, 12), doubles=st.integers(0, 8))
@settings(max_examples=50, deadline=None)
def test_every_row_is_with_its_nearest_centre_and_no_cluster_is_empty(seed: int, width: int, doubles: int) -> None:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[:doubles] = rows[0]
    rows[:, 2] = 1.0  # a column that does not vary
    cluster = cluster_rows(rows, width, seed=seed)
    assert cluster.bincount(minlength=width).min() > 0
    assert cluster.numel() == 12
    assert torch.equal(cluster, cluster_rows(rows, width, seed=seed))
    if doubles <= 12 - width:  # enough distinct rows that nothing had to be forced apart
        deviation = rows.std(dim=0, correction=0)
        scaled = (rows - rows.mean(dim=0)) / torch.where(deviation > 0, deviation, 1.0)
        centres = torch.stack([scaled[cluster == c].mean(dim=0) for c in range(width)])
        own = (scaled - centres[cluster]).square().sum(dim=1)
        nearest = torch.cdist(scaled, centres).square().min(dim=1).values
        assert bool((own <= nearest + 1e-9).all())


@pytest.mark.parametrize("ridge_rel", [0.0, 1e-2])
def test_fold_averages_the_first_layer_and_grail_fits_the_second(ridge_rel: float) -> None:
    first, shift, x, weight, _ = layer(1)
    result = fold(first, shift, weight, 5)
    for cluster in range(5):
        members = result.cluster_F == cluster
        torch.testing.assert_close(result.weight_KI[cluster], first[members].mean(dim=0))
        torch.testing.assert_close(result.bias_K[cluster], shift[members].mean())
        torch.testing.assert_close(result.plain_OK[:, cluster], weight[:, members].sum(dim=1))
    short = merged(x, result)
    torch.testing.assert_close(short, x @ result.map_KF.T)


def test_without_a_bias_there_is_none() -> None:
    first, _, _, weight, _ = layer(3)
    assert fold(first, None, weight, 4).bias_K.abs().max() == 0.0


def test_equal_channels_are_one() -> None:
    first, shift, _, weight, _ = layer(2, channels=6)
    twice = torch.tensor([0, 0, 1, 2, 2, 3, 4, 5])
    result = fold(first[twice], shift[twice], weight[:, [0, 1, 2, 3, 4, 5, 0, 1]], 6)
    assert result.cluster_F.tolist() == twice.tolist()
    torch.testing.assert_close(result.weight_KI, first)
    torch.testing.assert_close(result.plain_OK[:, 0], weight[:, 0] + weight[:, 1])
