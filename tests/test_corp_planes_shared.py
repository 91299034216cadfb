"""Planes of queries that share keys: one choice a group, each head's factors in its own queries."""

from itertools import combinations

import pytest
import torch
from torch import Tensor

from calib.moments import HeadMoments
from calib.sums import HeadSums
from corp_deploy.algebra import planes
from corp_deploy.algebra.image_system import whole_system
from corp_deploy.algebra.queries_keys import QkRecovery, residual_aggregated
from corp_deploy.algebra.scores import kept_from_scores, logit_energy, shared_by_groups

HEADS, GROUPED, TOKENS, DIMS, KEPT = 4, 2, 9, 8, 2


@pytest.fixture(scope="module")
def activations() -> tuple[Tensor, Tensor]:
    """Queries and keys [B,H,N,D], those of two heads in turn alike; planes of very different sizes."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.linspace(0.3, 2.0, DIMS // 2).repeat(2)
    q = torch.randn(5, HEADS, TOKENS, DIMS, generator=draw) * sizes
    k = torch.randn(5, HEADS // GROUPED, TOKENS, DIMS, generator=draw) * sizes.flip(0)
    return q + 0.3, k.repeat_interleave(GROUPED, dim=1)


@pytest.fixture(scope="module")
def moments(activations: tuple[Tensor, Tensor]) -> HeadMoments:
    sums = HeadSums(system=True, causal=True, plane_scale=DIMS**-0.5)
    for role, x in zip(("q", "k"), activations, strict=True):
        sums.add(role, x)  # type: ignore[arg-type]
    sums.add("z", torch.randn(5, TOKENS, HEADS * DIMS))
    return sums.moments()


def require_shared(recovery: QkRecovery) -> None:
    """Keys are selected alike by all heads of a group."""
    assert recovery.planes_HK is not None
    for head in range(HEADS):
        first = head - head % GROUPED
        assert torch.equal(recovery.planes_HK[head], recovery.planes_HK[first])
        assert torch.equal(recovery.k_map_HRD[head], recovery.k_map_HRD[first])
    dims_HR = planes.dims_of_planes(recovery.planes_HK, DIMS)
    assert torch.equal(recovery.k_map_HRD, torch.nn.functional.one_hot(dims_HR, DIMS).double())


def visible(activations: tuple[Tensor, Tensor], head: int) -> list[tuple[Tensor, Tensor]]:
    q, k = activations
    return [
        (q[own, head, place].double(), k[own, head, key].double())
        for own in range(len(q))
        for place in range(TOKENS)
        for key in range(place + 1)
    ]


def test_each_head_reaches_its_own_least_squares(activations: tuple[Tensor, Tensor], moments: HeadMoments) -> None:
    """A complex factor a plane and head, fitted over visible pairs by lstsq."""
    scores_HD = shared_by_groups(logit_energy(moments.energy_HD, moments.images), GROUPED)
    kept_HK = kept_from_scores(planes.plane_scores(scores_HD), KEPT)
    assert moments.system_HTT is not None
    system = whole_system(moments.system_HTT, DIMS)
    recovery = planes.logit(system, kept_HK, ridge_rel=1e-13, grouped=GROUPED)
    require_shared(recovery)
    half = DIMS // 2
    for head in range(HEADS):
        rows, logits, got = [], [], []
        for q, k in visible(activations, head):
            of_planes = []
            for plane in kept_HK[head].tolist():
                one, other = [plane, plane + half], [plane + half, plane]
                of_planes += [q[one] @ k[one], q[one] @ (k[other] * torch.tensor([1.0, -1.0]))]
            rows.append(torch.stack(of_planes))
            logits.append(q @ k)
            got.append((recovery.q_map_HRD[head] @ q) @ (recovery.k_map_HRD[head] @ k))
        a, b = torch.stack(rows), torch.stack(logits)
        best = float((a @ torch.linalg.lstsq(a, b[:, None]).solution.squeeze(1) - b).square().sum())
        assert float((torch.stack(got) - b).square().sum()) == pytest.approx(best, rel=1e-6)
        assert float(recovery.residual_H[head]) == pytest.approx(best, rel=1e-6)


def test_the_elimination_takes_one_plane_of_all_heads_of_a_group(moments: HeadMoments) -> None:
    second = moments.q_second_HDD, moments.k_centred_HDD
    recovery = planes.eliminated(*second, KEPT, ridge_rel=1e-6, grouped=GROUPED)
    require_shared(recovery)
    exact = residual_aggregated(*second, recovery.q_map_HRD, recovery.k_map_HRD)
    torch.testing.assert_close(recovery.residual_H, exact)
    alone = planes.eliminated(*second, KEPT, ridge_rel=1e-6)
    assert float(alone.residual_H.sum()) <= float(recovery.residual_H.sum()) * (1 + 1e-9)


def test_exact_elimination_loses_least_where_all_orders_are_tried(moments: HeadMoments) -> None:
    """Two of four planes kept: greedy against every pair of planes of the group, each with its best factors."""
    gram_HXX = moments.plane_gram_HXX
    assert gram_HXX is not None
    recovery = planes.eliminated_exactly(gram_HXX, KEPT, ridge_rel=1e-12, grouped=GROUPED)
    require_shared(recovery)
    half = DIMS // 2
    for first in range(0, HEADS, GROUPED):
        losses = []
        for kept in combinations(range(half), KEPT):
            lost = [plane for plane in range(half) if plane not in kept]
            total = 0.0
            for head in range(first, first + GROUPED):
                own, gone = [*kept, *(plane + half for plane in kept)], gram_HXX[head][:, lost].sum(dim=1)
                part = gram_HXX[head][own][:, own]
                best = torch.linalg.solve(part, -gone[own])
                x_X = torch.zeros(DIMS, dtype=torch.float64)
                x_X[lost], x_X[own] = 1.0, best
                total += float(x_X @ gram_HXX[head] @ x_X)
            losses.append(total)
        got = float(recovery.residual_H[first : first + GROUPED].sum())
        assert min(losses) * (1 - 1e-6) <= got <= 1.3 * min(losses)
    plain, whole = recovery.residual_uncompensated_H, torch.zeros(HEADS, 1, DIMS, dtype=torch.float64)
    assert bool((recovery.residual_H <= plain * (1 + 1e-9)).all())
    energy = planes.residual_exact(gram_HXX, whole, whole)
    assert bool((energy >= recovery.residual_H).all())


def test_groups_of_one_change_nothing(moments: HeadMoments) -> None:
    second = moments.q_second_HDD, moments.k_centred_HDD
    one = planes.eliminated(*second, KEPT, ridge_rel=1e-4)
    other = planes.eliminated(*second, KEPT, ridge_rel=1e-4, grouped=1)
    assert torch.equal(one.q_map_HRD, other.q_map_HRD)
    scores_HD = torch.rand(HEADS, DIMS)
    assert shared_by_groups(scores_HD, 1) is scores_HD
    expected = torch.stack([scores_HD[head - head % 2 : head - head % 2 + 2].sum(0) for head in range(HEADS)])
    torch.testing.assert_close(shared_by_groups(scores_HD, GROUPED), expected)
