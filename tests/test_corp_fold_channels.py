"""Merging channels: the clustering, against loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_deploy.algebra.fold import cluster_rows


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
