"""calib.redundancy on statistics with planted spectra."""

import math

import pytest
import torch
from torch import Tensor

from calib.moments import ChannelMoments, HeadMoments, Moments, SiteMoments
from calib.redundancy import ChannelRedundancy, HeadRedundancy, record_from_redundancy, redundancy_of_sites


def rotation(size: int, seed: int) -> Tensor:
    random = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    orthogonal: Tensor = torch.linalg.qr(random)[0]
    return orthogonal


def mlp_with_spectrum(spectrum: list[float], mean: float) -> ChannelMoments:
    """Make moments of 10 tokens with covariance Q diag(spectrum) Q^T and equal means; channel 0 is active in half."""
    q = rotation(len(spectrum), 0)
    mean_F = torch.full((len(spectrum),), mean, dtype=torch.float64)
    second = q @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ q.T + torch.outer(mean_F, mean_F)
    active = torch.full((len(spectrum),), 10.0, dtype=torch.float64)
    active[0] = 5.0
    return ChannelMoments(tokens=10, eps=0.5, sum_F=10 * mean_F, gram_FF=10 * second, active_F=active)


def attention_with_logit_spectrum(singular: list[float]) -> HeadMoments:
    """Make moments for which S_q^1/2 times the root of the centred S_k has these singular values."""
    dim = len(singular)
    u, v = rotation(dim, 1), rotation(dim, 2)
    root = torch.diag(torch.tensor(singular, dtype=torch.float64))
    q_root, k_root = u @ root @ u.T, u @ torch.eye(dim, dtype=torch.float64) @ u.T
    qq, kk = 7 * (q_root @ q_root)[None], 7 * (k_root @ k_root)[None]
    zeros = torch.zeros(1, dim, dtype=torch.float64)
    far = 1e3 * torch.outer(v[0], v[0])[None]
    return HeadMoments(
        images=1, tokens=7, q_sum_HD=zeros, k_sum_HD=zeros, qq_HDD=qq, kk_HDD=kk + far, kk_centred_HDD=kk,
        energy_HD=zeros, z_sum_C=torch.zeros(2).double(), zz_CC=torch.zeros(2, 2).double(),
    )  # fmt: skip


def only(moments: ChannelMoments | HeadMoments) -> ChannelRedundancy | HeadRedundancy:
    return redundancy_of_sites(Moments(sites={"site": moments}, lineage={}, images=1))[0]


def test_mlp_row_reports_a_planted_spectrum() -> None:
    row = only(mlp_with_spectrum([90.0, 4.0, 3.0, 2.0, 1.0], mean=100.0))
    assert isinstance(row, ChannelRedundancy)
    shares = [0.90, 0.04, 0.03, 0.02, 0.01]
    assert row.spectrum == pytest.approx(shares, abs=1e-9)
    assert row.effective_rank == pytest.approx(math.exp(-sum(s * math.log(s) for s in shares)))
    assert (row.dim, row.k95, row.k95_ratio) == (5, 3, 0.6)
    assert row.activation_sparsity == pytest.approx(0.1)
    assert row.effective_rank_ratio == pytest.approx(row.effective_rank / 5)


@pytest.mark.parametrize(("spectrum", "rank", "k95"), [([2.0] * 20, 20.0, 19), ([0.0] * 3, 0.0, 0)])
def test_equal_directions_have_full_rank_and_a_constant_none(spectrum: list[float], rank: float, k95: int) -> None:
    row = only(mlp_with_spectrum(spectrum, mean=0.0))
    assert (row.effective_rank, row.k95) == pytest.approx((rank, k95))


def test_attention_row_uses_keys_centred_per_image() -> None:
    """The squared singular values 100, 4 and 1 add up to 95.2 %, 99.0 % and 100 % of the energy."""
    row = only(attention_with_logit_spectrum([10.0, 2.0, 1.0]))
    assert isinstance(row, HeadRedundancy)
    assert row.spectrum[0] == pytest.approx([100 / 105, 4 / 105, 1 / 105])
    assert (row.dim, row.k95, row.k99) == (3, (1,), (2,))
    assert (row.k95_ratio, row.k99_ratio) == pytest.approx((1 / 3, 2 / 3))


def test_record_keeps_site_order_and_lineage() -> None:
    sites: dict[str, SiteMoments] = {
        "b.mlp": mlp_with_spectrum([1.0, 1.0], 0.0),
        "a.attn": attention_with_logit_spectrum([1.0, 1.0]),
    }
    record = record_from_redundancy(redundancy_of_sites(Moments(sites=sites, lineage={}, images=1)), {"model": "m"})
    assert (record["kind"], record["version"], record["lineage"]) == ("calib.redundancy", 1, {"model": "m"})
    assert [(row["site"], row["type"]) for row in record["sites"]] == [("b.mlp", "mlp"), ("a.attn", "attention")]
    assert record["sites"][1]["k99_ratio"] == 1.0
