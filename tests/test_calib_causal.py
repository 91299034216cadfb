"""Sums of causal attention against explicit float64 loops over inputs, queries and their visible keys."""

import itertools
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from calib import causal
from calib.moments import HeadMoments
from calib.products import pass_weights
from calib.sums import HeadSums
from corp_deploy.algebra import planes as planes_algebra
from corp_deploy.algebra import queries_keys
from corp_deploy.algebra.image_system import ImageSystem
from tests.doubles import some
from tests.refusals import rejects

INPUTS, HEADS, TOKENS, DIMS, KEPT = 3, 2, 7, 6, 4


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(INPUTS, HEADS, TOKENS, DIMS, generator=draw) for _ in range(2))
    return q, k + 3.0


def summed(
    q: Tensor, k: Tensor, mask: Tensor | None = None, *, system: bool = True, kept_HK: Tensor | None = None
) -> HeadMoments:
    sums = HeadSums(system=system, kept_HK=kept_HK, causal=True)
    weights = None if mask is None else pass_weights(mask, q.device)
    sums.add("q", q, weights)
    sums.add("k", k, weights)
    sums.add("z", torch.randn(len(q), q.shape[2], HEADS * DIMS), weights)
    sums.flush()
    return sums.moments()


def pairs(q: Tensor, k: Tensor, mask: Tensor | None, head: int) -> Iterator[tuple[int, Tensor, Tensor, float]]:
    """Yield for each unmasked query its input, the query, its visible keys [n,D] and 2 / (tokens + 1)."""
    for own in range(len(q)):
        there = range(q.shape[2]) if mask is None else [place for place in range(q.shape[2]) if mask[own, place] > 0]
        for count, place in enumerate(there, start=1):
            seen = k[own, head, list(there)[:count]].double()
            yield own, q[own, head, place].double(), seen, 2.0 / (len(there) + 1)


def upper(x_DD: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(len(x_DD), len(x_DD))
    return x_DD[rows, columns]


MASKS = [None, torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0], [1] + [0] * 6])]


@pytest.mark.parametrize("mask", MASKS, ids=["full", "padded"])
def test_every_sum_equals_loops_over_visible_pairs(mask: Tensor | None) -> None:
    q, k = drawn()
    got = summed(q, k, mask)
    assert got.images == INPUTS
    triangle = DIMS * (DIMS + 1) // 2
    for head in range(HEADS):
        expected = {each: torch.zeros(DIMS, dtype=torch.float64) for each in ("q_sum_HD", "k_sum_HD", "energy_HD")}
        squares = ("qq_HDD", "kk_HDD", "kk_centred_HDD")
        expected |= {each: torch.zeros(DIMS, DIMS, dtype=torch.float64) for each in squares}
        expected["system_HTT"] = torch.zeros(triangle, triangle, dtype=torch.float64)
        for _, query, keys, scale in pairs(q, k, mask, head):
            expected["system_HTT"] += torch.outer(upper(keys.T @ keys), upper(torch.outer(query, query)))
            for key in keys:
                expected["q_sum_HD"] += scale * query
                expected["k_sum_HD"] += scale * key
                expected["qq_HDD"] += scale * torch.outer(query, query)
                expected["kk_HDD"] += scale * torch.outer(key, key)
                centred = key - keys.mean(dim=0)
                expected["kk_centred_HDD"] += scale * torch.outer(centred, centred)
                expected["energy_HD"] += query.square() * key.square()
        for name, value in expected.items():
            torch.testing.assert_close(getattr(got, name)[head], value, rtol=1e-9, atol=1e-9, msg=name)


def test_restricted_system_equals_the_full_system_of_kept_dims() -> None:
    """Loops check its target and the energy of the dropped dims too."""
    q, k = drawn(1)
    kept_HK = torch.tensor([[0, 2, 3, 5], [1, 2, 3, 4]])
    got = summed(q, k, kept_HK=kept_HK)
    whole = summed(q[..., :KEPT], k[..., :KEPT])
    inside = [torch.stack([x[:, head][..., kept_HK[head]] for head in range(HEADS)], dim=1) for x in (q, k)]
    torch.testing.assert_close(got.system_HTT, summed(*inside).system_HTT, rtol=1e-12, atol=1e-12)
    assert whole.system_HTT is not None
    for head in range(HEADS):
        outside = [dim for dim in range(DIMS) if dim not in kept_HK[head].tolist()]
        target, energy = torch.zeros(KEPT, KEPT, dtype=torch.float64), 0.0
        for _, query, keys, _ in pairs(q, k, None, head):
            missing = keys[:, outside] @ query[outside]
            target += torch.outer(query[kept_HK[head]], missing @ keys[:, kept_HK[head]])
            energy += float(missing.square().sum())
        torch.testing.assert_close(some(got.target_HKK)[head], target, rtol=1e-9, atol=1e-9)
        assert float(some(got.target_energy_H)[head]) == pytest.approx(energy, rel=1e-9)


def test_corp_maps_equal_least_squares_over_visible_pairs() -> None:
    """lstsq solves eq. 14-16 for M with one row per visible pair."""
    q, k = drawn(4)
    kept_HK = torch.tensor([[0, 1, 2], [2, 3, 5]])
    sums = summed(q, k, kept_HK=kept_HK)
    system = ImageSystem(
        head_dim=DIMS, covered_HS=kept_HK, system_HTT=some(sums.system_HTT), target_HSS=some(sums.target_HKK),
        energy_H=some(sums.target_energy_H),
    )  # fmt: skip
    recovery = queries_keys.logit(system, kept_HK, ridge_rel=1e-13)
    for head in range(HEADS):
        kept_K = kept_HK[head].tolist()
        outside = [dim for dim in range(DIMS) if dim not in kept_K]
        rows, missing = [], []
        for _, query, keys, _ in pairs(q, k, None, head):
            for key in keys:
                rows.append(torch.outer(query[kept_K], key[kept_K]).flatten())
                missing.append(query[outside] @ key[outside])
        a, b = torch.stack(rows), torch.stack(missing)
        best = (a @ torch.linalg.lstsq(a, b[:, None]).solution.squeeze(1) - b).square().sum()
        logits = recovery.q_map_HRD[head].T @ recovery.k_map_HRD[head]
        lost = [query @ (torch.eye(DIMS).double() - logits) @ keys.T for _, query, keys, _ in pairs(q, k, None, head)]
        assert float(torch.cat(lost).square().sum()) == pytest.approx(float(best), rel=1e-6)


@pytest.mark.parametrize("mask", MASKS, ids=["full", "padded"])
def test_plane_quadratic_equals_the_change_of_attention(mask: Tensor | None) -> None:
    """The change is half the variance of the change of scores under each query's attention."""
    q, k = drawn(7)
    scale = 0.4
    sums = HeadSums(system=False, causal=True, plane_scale=scale)
    weights = None if mask is None else pass_weights(mask, q.device)
    for role, x in (("q", q), ("k", k), ("z", torch.zeros(INPUTS, TOKENS, 2))):
        sums.add(role, x, weights)  # type: ignore[arg-type]
    gram = sums.moments().plane_gram_HXX
    assert gram is not None
    x_X = 1e-3 * torch.randn(DIMS, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    planes = DIMS // 2
    lost_DD = torch.zeros(DIMS, DIMS, dtype=torch.float64)
    for plane in range(planes):
        one, other = plane, plane + planes
        lost_DD[one, one] = lost_DD[other, other] = x_X[plane]
        lost_DD[one, other], lost_DD[other, one] = x_X[other], -x_X[other]
    for head in range(HEADS):
        expected = divergence = 0.0
        for _, query, keys, _ in pairs(q, k, mask, head):
            scores, change = scale * (keys @ query), scale * (keys @ (query @ lost_DD))
            p, moved = scores.softmax(0), (scores - change).softmax(0)
            expected += 0.5 * float((p * (change - (p * change).sum()).square()).sum())
            divergence += float((p * (p / moved).log()).sum())
        assert float(x_X @ gram[head] @ x_X) == pytest.approx(expected, rel=1e-9)
        assert divergence == pytest.approx(expected, rel=0.02)
        q_map, k_map = torch.eye(DIMS).double() - lost_DD.T, torch.eye(DIMS).double()
        exact = planes_algebra.residual_exact(gram[head : head + 1], q_map[None], k_map[None])
        assert float(exact) == pytest.approx(expected, rel=1e-9)


def test_many_queries_are_subsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second query is taken, the last included, and counts twice."""
    q, k = (x[0, :, :6].double() for x in drawn(9))
    monkeypatch.setattr(causal, "PLANE_QUERIES", 3)
    got = causal.gram_of_planes(q, k, 0.5)
    monkeypatch.setattr(causal, "PLANE_QUERIES", 64)
    nothing = torch.zeros(HEADS, DIMS, DIMS, dtype=torch.float64)
    whole = [nothing, *(causal.gram_of_planes(q[:, :count], k[:, :count], 0.5) for count in range(1, 7))]
    alone = [later - earlier for earlier, later in itertools.pairwise(whole)]
    torch.testing.assert_close(got, 2.0 * (alone[1] + alone[3] + alone[5]))


@pytest.mark.parametrize("entries", [1, 100])
def test_block_size_does_not_change_the_sums(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    q, k = drawn(5)
    kept_HK = torch.tensor([[0, 2, 3, 5], [1, 2, 3, 4]])
    expected = summed(q, k, kept_HK=kept_HK)
    monkeypatch.setattr(causal, "BLOCK_ENTRIES", entries)
    got = summed(q, k, kept_HK=kept_HK)
    for each in fields(got):
        if not each.name.startswith("z") and isinstance(getattr(got, each.name), Tensor):
            torch.testing.assert_close(getattr(got, each.name), getattr(expected, each.name), rtol=1e-12, atol=1e-12)


def test_equal_keys_have_zero_centred_moments() -> None:
    q, k = drawn()
    got = summed(q, torch.full_like(k, 1e3))
    assert float(got.kk_centred_HDD.abs().max()) < 1e-9


def test_non_binary_masks_are_refused() -> None:
    q, k = drawn()
    rejects("weights other than 0 and 1", summed, q, k, torch.full((INPUTS, TOKENS), 0.5))
    sums = HeadSums(system=False, causal=True)
    sums.add("q", q)
    rejects("of both", sums.add, "k", k[:, :1].expand(-1, HEADS, -1, -1)[:, :, :-1])
