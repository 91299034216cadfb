"""Closed forms of queries and keys, compared with loops over images, numpy's kron and planted answers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from corp_deploy.algebra import queries_keys as qk
from corp_deploy.algebra.image_system import ImageSystem, logit_system, whole_system

Array = NDArray[np.floating[Any]]
IMAGES, HEADS, TOKENS, DIM = 7, 2, 9, 6


def heads(seed: int, *, tokens: int = TOKENS, rank: int = DIM, shift: float = 0.7) -> tuple[Tensor, Tensor]:
    """Draw q and k, [images, heads, tokens, D], with a mix and a mean of each head and a scale of each image."""
    generator = torch.Generator().manual_seed(seed)

    def one() -> Tensor:
        mix = torch.randn(HEADS, rank, DIM, generator=generator, dtype=torch.float64)
        swing = 0.5 + torch.rand(IMAGES, HEADS, 1, rank, generator=generator, dtype=torch.float64)
        raw = torch.randn(IMAGES, HEADS, tokens, rank, generator=generator, dtype=torch.float64)
        return (raw * swing) @ mix + shift * torch.randn(HEADS, 1, DIM, generator=generator, dtype=torch.float64)

    return one(), one()


def whole(q: Tensor, k: Tensor) -> ImageSystem:
    first, second = torch.triu_indices(DIM, DIM)
    k_half, q_half = (k.mT @ k)[..., first, second], (q.mT @ q)[..., first, second]
    return whole_system(torch.einsum("bhp,bhr->hpr", k_half, q_half), DIM)


def part_of(q: Tensor, k: Tensor, covered_HS: Tensor) -> ImageSystem:
    """Sum the system restricted to these dimensions, image by image."""
    first, second = torch.triu_indices(covered_HS.shape[1], covered_HS.shape[1])
    systems, targets, energies = [], [], []
    for head, covered in enumerate(covered_HS.tolist()):
        left = [j for j in range(DIM) if j not in covered]
        q_s, q_p, k_s, k_p = (x[:, head][..., dims] for x in (q, k) for dims in (covered, left))
        k_half, q_half = (k_s.mT @ k_s)[:, first, second], (q_s.mT @ q_s)[:, first, second]
        systems.append(torch.einsum("bp,br->pr", k_half, q_half))
        targets.append(((q_s.mT @ q_p) @ (k_p.mT @ k_s)).sum(0))
        energies.append((q_p @ k_p.mT).square().sum())
    return ImageSystem(
        head_dim=DIM,
        covered_HS=covered_HS,
        system_HTT=torch.stack(systems),
        target_HSS=torch.stack(targets),
        energy_H=torch.stack(energies),
    )


def second_of(x: Tensor, *, centred: bool = False) -> Tensor:
    if centred:
        x = x - x.mean(dim=2, keepdim=True)
    return torch.einsum("bhni,bhnj->hij", x, x) / (x.shape[0] * x.shape[2])


def logits_lost(q: Tensor, k: Tensor, result: qk.QkRecovery) -> Tensor:
    """Sum the squared differences between dense and reduced logits over images, for each head."""
    reduced = (q @ result.q_map_HRD.mT) @ (k @ result.k_map_HRD.mT).mT
    return (q @ k.mT - reduced).square().sum(dim=(0, 2, 3))


def papers_m(q: Array, k: Array, kept: list[int], ridge_rel: float) -> tuple[Array, Array, Array]:
    """Solve eq. 15 as the paper writes it for one head, [images, tokens, D], and return M, G and h."""
    pruned = [j for j in range(q.shape[-1]) if j not in kept]
    size = len(kept) ** 2
    g, h = np.zeros((size, size)), np.zeros(size)
    for q_b, k_b in zip(q, k, strict=True):
        q_s, q_p, k_s, k_p = q_b[:, kept], q_b[:, pruned], k_b[:, kept], k_b[:, pruned]
        g += np.kron(k_s.T @ k_s, q_s.T @ q_s)
        h += ((q_s.T @ q_p) @ (k_p.T @ k_s)).flatten(order="F")
    m = np.linalg.solve(g + ridge_rel * np.trace(g) / size * np.eye(size), h)
    return m.reshape(len(kept), len(kept), order="F"), g, h


def product(result: qk.QkRecovery, head: int) -> Array:
    whole: Array = (result.q_map_HRD[head].T @ result.k_map_HRD[head]).numpy()
    return whole


@pytest.mark.parametrize("ridge_rel", [1e-4, 1e-1])
def test_logit_recovery_equals_equations_14_to_16(ridge_rel: float) -> None:
    q, k = heads(0)
    kept_HR = torch.tensor([[0, 2, 5], [1, 2, 3]])
    result = qk.logit(whole(q, k), kept_HR, ridge_rel=ridge_rel)
    ridges, conditions = list[float](), list[float]()
    for head, kept in enumerate(kept_HR.tolist()):
        m, g, h = papers_m(q[:, head].numpy(), k[:, head].numpy(), kept, ridge_rel)
        expected = np.zeros((DIM, DIM))
        expected[np.ix_(kept, kept)] = np.eye(3) + m
        np.testing.assert_allclose(product(result, head), expected, atol=1e-9)
        u, s, vt = np.linalg.svd(np.eye(3) + m)
        np.testing.assert_allclose(result.q_map_HRD[head][:, kept].abs(), np.abs((u * np.sqrt(s)).T), atol=1e-8)
        np.testing.assert_allclose(result.k_map_HRD[head][:, kept].abs(), np.abs(np.sqrt(s)[:, None] * vt), atol=1e-8)
        picked = logit_system(whole(q, k), head, kept_HR[head])
        np.testing.assert_allclose(picked.gram, g, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(picked.cross, h, rtol=1e-9, atol=1e-9)
        ridges.append(float(ridge_rel * np.trace(g) / 9))
        conditions.append(float(np.linalg.cond(g + ridges[-1] * np.eye(9), 1)))
    assert (result.ridge, result.condition) == pytest.approx((max(ridges), max(conditions)))
    torch.testing.assert_close(result.residual_H, logits_lost(q, k, result))
    dropped = qk.select(kept_HR, q_second_HDD=second_of(q), k_second_HDD=second_of(k))
    torch.testing.assert_close(result.residual_uncompensated_H, logits_lost(q, k, dropped))
    assert 0.0 < result.r2 < 1.0
    others = qk.lowrank(second_of(q), second_of(k), 4)
    judged = qk.residual_per_image(whole(q, k), others.q_map_HRD, others.k_map_HRD)
    torch.testing.assert_close(judged, logits_lost(q, k, others))


def test_lowrank_equals_the_truncated_svd_of_all_logits() -> None:
    """All queries times all centred keys is the matrix whose best rank-r approximation numpy's SVD gives."""
    q, k = heads(3)
    centred = k - k.mean(dim=2, keepdim=True)
    rows = IMAGES * TOKENS
    result = qk.lowrank(second_of(q), second_of(k, centred=True), 3)
    for head in range(HEADS):
        all_q, all_k = q[:, head].reshape(rows, DIM).numpy(), centred[:, head].reshape(rows, DIM).numpy()
        u, s, vt = np.linalg.svd(all_q @ all_k.T)
        best = (u[:, :3] * s[:3]) @ vt[:3]
        np.testing.assert_allclose(all_q @ product(result, head) @ all_k.T, best, atol=1e-8 * s[0])
        assert float(result.residual_H[head]) == pytest.approx(np.square(s[3:]).sum() / rows**2, rel=1e-9)


def test_centring_keys_does_not_change_attention() -> None:
    """Centring keys in `lowrank` shifts each query's logits by a constant, which softmax ignores."""
    q, k = heads(4)
    result = qk.lowrank(second_of(q), second_of(k, centred=True), DIM)
    dense = torch.softmax(q @ k.mT / DIM**0.5, dim=-1)
    reduced = torch.softmax((q @ result.q_map_HRD.mT) @ (k @ result.k_map_HRD.mT).mT / DIM**0.5, dim=-1)
    torch.testing.assert_close(reduced, dense, rtol=1e-7, atol=1e-10)


def test_planted_m_is_recovered() -> None:
    """Pruned queries and keys are linear in the kept ones, so I + M restores every logit."""
    q, k = heads(6)
    generator = torch.Generator().manual_seed(6)
    a, b = torch.randn(2, HEADS, 3, 3, generator=generator, dtype=torch.float64)
    q[..., 3:], k[..., 3:] = q[..., :3] @ a, k[..., :3] @ b
    kept_HR = torch.arange(3).expand(HEADS, 3)
    for result in (
        qk.logit(whole(q, k), kept_HR, ridge_rel=1e-12),
        qk.logit_v1(second_of(q), second_of(k), kept_HR, ridge_rel=1e-12),
    ):
        expected = torch.eye(3, dtype=torch.float64) + a @ b.mT
        got = (result.q_map_HRD.mT @ result.k_map_HRD)[:, :3, :3]
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        assert result.r2 == pytest.approx(1.0)
        assert float(logits_lost(q, k, result).max()) < 1e-6


def test_select_is_judged_on_its_own_statistics() -> None:
    q, k = heads(7)
    kept_HR = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5]])
    result = qk.select(kept_HR, q_second_HDD=second_of(q), k_second_HDD=second_of(k))
    for head, kept in enumerate(kept_HR.tolist()):
        pruned = [j for j in range(DIM) if j not in kept]
        all_q, all_k = q[:, head].reshape(-1, DIM)[:, pruned], k[:, head].reshape(-1, DIM)[:, pruned]
        pairs = (IMAGES * TOKENS) ** 2
        assert float(result.residual_H[head]) == pytest.approx(float((all_q @ all_k.T).square().sum()) / pairs)
    torch.testing.assert_close(q @ result.q_map_HRD.mT, torch.stack([q[:, h][..., kept_HR[h]] for h in (0, 1)], dim=1))


@given(
    seed=st.integers(0, 10_000),
    rank=st.integers(1, DIM),
    tokens=st.sampled_from([1, 2, TOKENS]),
    width=st.integers(1, DIM),
    ridge_rel=st.sampled_from([0.0, 1e-8, 1e-4, 1e-1]),
)
@settings(max_examples=60, deadline=None)
def test_no_recovery_is_worse_than_dropping(seed: int, rank: int, tokens: int, width: int, ridge_rel: float) -> None:
    """Statistics may be singular: fewer directions than dimensions, or single tokens, whose centred keys vanish."""
    q, k = heads(seed, rank=rank, tokens=tokens, shift=float(seed % 2))
    generator = torch.Generator().manual_seed(seed)
    kept_HR = torch.stack([torch.randperm(DIM, generator=generator)[:width].sort().values for _ in range(HEADS)])
    system, q_second, k_second = whole(q, k), second_of(q), second_of(k)
    results = [
        qk.logit(system, kept_HR, ridge_rel=ridge_rel),
        qk.logit_v1(q_second, k_second, kept_HR, ridge_rel=ridge_rel),
        qk.lowrank(q_second, k_second, width),
        qk.lowrank(q_second, second_of(k, centred=True), width),
    ]
    for result in results:
        assert bool(torch.isfinite(result.q_map_HRD).all() and torch.isfinite(result.k_map_HRD).all())
        scale = float(result.residual_uncompensated_H.max())
        assert bool((result.residual_H <= result.residual_uncompensated_H * (1 + 1e-8) + 1e-9 * scale).all())
        assert result.condition >= 1.0
    energy = (q @ k.mT).square().sum(dim=(0, 2, 3))
    assert bool(((results[0].residual_H - logits_lost(q, k, results[0])).abs() <= 1e-7 * energy).all())
    dropped = qk.select(kept_HR, q_second_HDD=q_second, k_second_HDD=k_second).residual_H
    aggregated = qk.residual_aggregated(q_second, k_second, results[2].q_map_HRD, results[2].k_map_HRD)
    level = (q_second * k_second).sum(dim=(1, 2))
    assert bool((aggregated <= dropped + 1e-5 * level).all())


def test_full_width_equals_the_dense_head() -> None:
    q, k = heads(9)
    everything = torch.arange(DIM).expand(HEADS, DIM)
    for result in (
        qk.select(everything, q_second_HDD=second_of(q), k_second_HDD=second_of(k)),
        qk.logit(whole(q, k), everything, ridge_rel=1e-4),
        qk.logit_v1(second_of(q), second_of(k), everything, ridge_rel=1e-4),
        qk.lowrank(second_of(q), second_of(k), DIM),
    ):
        identity = torch.eye(DIM, dtype=torch.float64).expand(HEADS, DIM, DIM)
        torch.testing.assert_close(result.q_map_HRD.mT @ result.k_map_HRD, identity)
        assert float(result.residual_H.max()) < 1e-12


@pytest.mark.parametrize("rank", [DIM, 2])
@pytest.mark.parametrize("kept", [[[0, 2, 5, 1], [1, 2, 3, 5]], [[0, 5], [2, 3]], [[5], [1]]])
def test_restricted_system_equals_the_full_one(kept: list[list[int]], rank: int) -> None:
    """The kept set is that of the restricted system or a narrower one, with full-rank or singular queries and keys."""
    q, k = heads(11, rank=rank)
    kept_HR = torch.tensor(kept).sort().values
    part = part_of(q, k, torch.tensor([[0, 1, 2, 5], [1, 2, 3, 5]]))
    for head in range(HEADS):
        expected, got = (logit_system(system, head, kept_HR[head]) for system in (whole(q, k), part))
        torch.testing.assert_close(got.gram, expected.gram, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.cross, expected.cross, rtol=1e-11, atol=1e-11 * float(expected.gram.max()))
        assert got.missing == pytest.approx(expected.missing, rel=1e-11)
    exact, found = (qk.logit(system, kept_HR, ridge_rel=1e-4) for system in (whole(q, k), part))
    scale = float(exact.residual_uncompensated_H.max())
    product = exact.q_map_HRD.mT @ exact.k_map_HRD
    torch.testing.assert_close(found.q_map_HRD.mT @ found.k_map_HRD, product, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.residual_H, exact.residual_H, rtol=1e-9, atol=1e-9 * scale)
    maps = found.q_map_HRD, 0.5 * found.k_map_HRD  # any maps, not only the fitted ones
    judged, by_whole = (qk.residual_per_image(system, *maps) for system in (part, whole(q, k)))
    torch.testing.assert_close(judged, by_whole, rtol=1e-9, atol=1e-9 * scale)


def test_restricted_system_refuses_maps_it_cannot_judge() -> None:
    q, k = heads(12)
    part = part_of(q, k, torch.tensor([[0, 1, 2], [3, 4, 5]]))
    inside = qk.select(torch.tensor([[0, 2], [3, 4]]), q_second_HDD=second_of(q), k_second_HDD=second_of(k))
    outside = qk.select(torch.tensor([[0, 3], [3, 4]]), q_second_HDD=second_of(q), k_second_HDD=second_of(k))
    assert part.covers(inside.q_map_HRD)
    assert not part.covers(outside.q_map_HRD)
