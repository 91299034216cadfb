"""Rotary queries and keys: kept planes and fitted factors, compared with sums over images.

Legend: B images, H heads, N tokens, D = 2 P dimensions, P planes, K kept.
"""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from calib.moments import HeadMoments
from calib.sites import HeadTaps
from calib.sums import HeadSums
from corp_deploy.algebra import planes
from corp_deploy.algebra.image_system import ImageSystem, whole_system
from corp_deploy.algebra.queries_keys import QkRecovery, residual_aggregated, residual_per_image
from corp_deploy.algebra.ridges import ridges_from
from corp_deploy.algebra.scores import kept_from_scores, logit_energy, shared_by_groups
from corp_deploy.families.family import sites_of
from corp_deploy.families.rotary import apply_rotary
from corp_deploy.reduction.calibrate import Statistics, calibrate, kept_dims, kept_widths, restricted_widths
from corp_deploy.reduction.heads import kept_planes
from corp_deploy.reduction.logits import system_of as logits_system
from corp_deploy.reduction.model import reduce
from corp_deploy.reduction.moments import splits_at
from corp_deploy.reduction.snapshots import moments_in_splits
from corp_deploy.store.checkpoint import Checkpoint
from corp_deploy.traced.models.pairs import TracedPairs
from tests.refusals import rejects
from tests.timm_models import checkpoint, method, opened
from tests.timm_models import moments as moments_of_form

IMAGES, HEADS, TOKENS, PLANES = 3, 2, 7, 4
DIMS = 2 * PLANES


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def complex_of(x: Tensor) -> Tensor:
    """Return [..., 2P] as P complex numbers."""
    one, other = x.chunk(2, dim=-1)
    return torch.complex(one.contiguous(), other.contiguous())


def raw(kind: str = "random") -> tuple[Tensor, Tensor]:
    """Draw q and k [B,H,N,D] before their rotation."""
    q, k = (torch.randn(IMAGES, HEADS, TOKENS, DIMS, generator=generator(seed), dtype=torch.float64) for seed in (1, 2))
    if kind == "ill-conditioned":
        q *= torch.logspace(0, -4, DIMS, dtype=torch.float64)
        k *= torch.logspace(-3, 0, DIMS, dtype=torch.float64)
    if kind == "singular":
        q[..., 1], q[..., 1 + PLANES] = 0.0, 0.0
        k[..., 2], k[..., 2 + PLANES] = k[..., 0], k[..., PLANES]
    return q, k


def angles(seed: int = 3) -> Tensor:
    """Draw rotary angles [H,N,P], zero for the first token."""
    angle_HNP = torch.rand(HEADS, TOKENS, PLANES, generator=generator(seed), dtype=torch.float64) * 2.0 * math.pi
    angle_HNP[:, 0] = 0.0
    return angle_HNP


def turned_by(q: Tensor, k: Tensor, angle_HNP: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary(q, angle_HNP.sin(), angle_HNP.cos()), apply_rotary(k, angle_HNP.sin(), angle_HNP.cos())


def second(x: Tensor) -> Tensor:
    return torch.einsum("bhni,bhnj->hij", x, x) / (IMAGES * TOKENS)


def system_of(q: Tensor, k: Tensor) -> ImageSystem:
    """Sum upper(K'K) upper(Q'Q)' over images."""
    rows, columns = torch.triu_indices(DIMS, DIMS)
    total = torch.zeros(HEADS, len(rows), len(rows), dtype=torch.float64)
    for image in range(IMAGES):
        for head in range(HEADS):
            grams = [x[image, head].T @ x[image, head] for x in (k, q)]
            total[head] += torch.outer(grams[0][rows, columns], grams[1][rows, columns])
    return whole_system(total, DIMS)


def least_squares(q_BND: Tensor, k_BND: Tensor, kept: list[int], is_seen_NN: Tensor) -> float:
    """Return the least squared error of a head's visible logits over all images, with a complex factor for each plane.

    The logit of c q and k is the real part of c q conj(k).
    """
    product_XP = (complex_of(q_BND)[:, :, None] * complex_of(k_BND)[:, None].conj())[:, is_seen_NN].flatten(0, 1)
    rows = torch.cat((product_XP[:, kept].real, product_XP[:, kept].imag), dim=1)
    target = product_XP.real.sum(dim=1)
    solved = torch.linalg.lstsq(rows, target[:, None], driver="gelsd").solution
    return float((target - (rows @ solved)[:, 0]).square().sum())


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "singular"])
def test_factors_are_least_squares_over_images(kind: str) -> None:
    q, k = turned_by(*raw(kind), angles())
    kept_HK = torch.tensor([[0, 2], [1, 3]])
    recovery = planes.logit_planes(system_of(q, k), kept_HK, ridge_rel=1e-14)
    dense, narrow = q @ k.mT, (q @ recovery.q_map_HRD.mT) @ (k @ recovery.k_map_HRD.mT).mT
    for head, kept in enumerate(kept_HK.tolist()):
        left = least_squares(q[:, head], k[:, head], kept, torch.ones(TOKENS, TOKENS, dtype=torch.bool))
        whole = float(dense[:, head].square().sum())
        assert float(recovery.residual_H[head]) == pytest.approx(left, rel=1e-6, abs=1e-9 * whole)
        by_hand = float((dense - narrow)[:, head].square().sum())
        assert by_hand == pytest.approx(left, rel=1e-5, abs=1e-9 * whole)


@pytest.mark.parametrize("kind", ["random", "ill-conditioned", "singular"])
def test_factors_on_second_moments_have_zero_gradient(kind: str) -> None:
    """The error is tr(S_q E S_k E') of the maps, and autograd differentiates it by the factors."""
    q, k = turned_by(*raw(kind), angles())
    kept_HK = torch.tensor([[0, 2], [1, 3]])
    recovery = planes.fit_aggregated(second(q), second(k), kept_HK, kept_HK, ridge_rel=1e-13, grouped=1)
    for head in range(HEADS):
        turns = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)  # factors are multiplied by 1 + these
        rows = recovery.q_map_HRD[head]
        one, other = rows.chunk(2)
        real, imaginary = 1.0 + turns[:, :1], turns[:, 1:]
        q_map = torch.cat((real * one - imaginary * other, imaginary * one + real * other))
        lost = torch.eye(DIMS, dtype=torch.float64) - q_map.T @ recovery.k_map_HRD[head]
        error = ((second(q)[head] @ lost @ second(k)[head]) * lost).sum()
        (slope,) = torch.autograd.grad(error, turns)
        energy = float((second(q)[head] * second(k)[head]).sum())
        assert float(error.detach()) == pytest.approx(float(recovery.residual_H[head]), rel=1e-6, abs=1e-9 * energy)
        assert float(slope.abs().max()) < 1e-7 * energy


def test_maps_commute_with_every_rotation() -> None:
    q, k = raw()
    angle_HNP = angles()
    q_turned, k_turned = turned_by(q, k, angle_HNP)
    recovery = planes.eliminate_planes(second(q_turned), second(k_turned), 2, ridge_rel=1e-4)
    assert recovery.planes_HK is not None
    own_HNK = torch.stack([each[:, planes] for each, planes in zip(angle_HNP, recovery.planes_HK, strict=True)])
    for maps, before, after in zip((recovery.q_map_HRD, recovery.k_map_HRD), (q, k), (q_turned, k_turned), strict=True):
        narrow = before @ maps.mT
        turns = apply_rotary(narrow, own_HNK.sin(), own_HNK.cos())
        torch.testing.assert_close(turns, after @ maps.mT, rtol=1e-12, atol=1e-12)


def test_elimination_removes_the_cheapest_plane() -> None:
    """Every removal is compared with a solved fit of every other removal, with the same ridge."""
    q, k = turned_by(*raw("ill-conditioned"), angles())
    loss, ridge_rel = planes.aggregated_loss(second(q), second(k)), 1e-3
    order_HP = planes.order_planes(loss.gram_HXX, ridge_rel=ridge_rel)
    for head in range(HEADS):
        gram = loss.gram_HXX[head]
        shifted = gram + ridge_rel * gram.diagonal().mean() * torch.eye(DIMS, dtype=torch.float64)

        def cost(kept: list[int], shifted: Tensor = shifted) -> float:
            at = torch.tensor([*kept, *(plane + PLANES for plane in kept)], dtype=torch.int64)
            lost = torch.tensor([float(i < PLANES and i not in kept) for i in range(DIMS)], dtype=torch.float64)
            x = lost.clone()
            x[at] = -torch.linalg.solve(shifted[at[:, None], at], (shifted @ lost)[at])
            return float(x @ shifted @ x)

        kept = list(range(PLANES))
        for removed in order_HP[head].tolist():
            costs = {plane: cost([other for other in kept if other != plane]) for plane in kept}
            assert costs[removed] == pytest.approx(min(costs.values()), rel=1e-6)
            kept.remove(removed)


def test_zero_head_is_handled() -> None:
    nothing = torch.zeros(1, DIMS, DIMS, dtype=torch.float64)
    recovery = planes.eliminate_planes(nothing, torch.eye(DIMS, dtype=torch.float64)[None], 2, ridge_rel=1e-4)
    assert float(recovery.residual_H) == 0.0
    assert bool(recovery.q_map_HRD.isfinite().all())


# CORP's per-image system of the kept planes alone, and its ridge, chosen on halves of the images.

FORM = "learned angles"


@pytest.fixture(scope="module")
def whole() -> Checkpoint:
    return checkpoint(FORM)


def taps(whole: Checkpoint) -> list[HeadTaps]:
    return [each for site in sites_of(whole.model).every if isinstance(site, TracedPairs) for each in site.listening()]


@pytest.fixture(scope="module")
def kept(whole: Checkpoint) -> dict[str, torch.Tensor]:
    return kept_dims(whole.model, moments_of_form(FORM), kept_widths(whole.model, taps(whole), (0.5,), 8))


def test_whole_planes_are_kept(kept: dict[str, torch.Tensor]) -> None:
    for name, dims_HK in kept.items():
        statistics = moments_of_form(FORM).sites[name]
        assert isinstance(statistics, HeadMoments)
        assert dims_HK.shape == (3, 8)
        for head, dims in enumerate(dims_HK.tolist()):
            energy = statistics.energy_HD[head].view(2, 8).sum(dim=0).tolist()
            best = sorted(sorted(range(8), key=energy.__getitem__)[-4:])
            assert dims == best + [plane + 8 for plane in best]
            assert kept_planes(statistics.energy_HD, 8)[head].tolist() == best


def test_restricted_system_reduces_like_the_full_one(whole: Checkpoint, kept: dict[str, torch.Tensor]) -> None:
    statistics = Statistics(attention_system=True, kept=kept)
    taken = calibrate(whole, opened(whole.model), batch_size=8, statistics=statistics)
    asked = method("corp", mlp_sparsity=None)
    one, other = (reduce(whole.model, each, asked) for each in (moments_of_form(FORM), taken))
    for exact, site in zip(one.sites, other.sites, strict=True):
        assert site.error == pytest.approx(exact.error, rel=1e-6)
        assert site.error <= site.error_uncompensated
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    wider = method("corp", mlp_sparsity=None, attention_sparsity=0.25, align_head=4)
    rejects("covers 8 of 16 dimensions; expected a width of 4, 8", reduce, whole.model, taken, wider)
    full = reduce(whole.model, taken, method("corp", mlp_sparsity=None, attention_sparsity=0.0))
    assert all(site.error == 0.0 for site in full.sites)


def test_offered_sparsities_keep_whole_planes(whole: Checkpoint) -> None:
    for _, widths in restricted_widths(whole.model, taps(whole), 3):
        assert all(width % 2 == 0 for width in widths.values()), widths


def test_halves_of_the_images_choose_the_ridge(whole: Checkpoint) -> None:
    """With the reported strength, factors fitted on each half lose the least of the other half's logits."""
    statistics = Statistics(attention_system=True)
    taken = moments_in_splits(
        opened(whole.model),
        torch.arange(24) // 4,
        lambda half, number: calibrate(whole, half, batch_size=8, statistics=statistics),
        seed=0,
    )
    asked = method("corp", mlp_sparsity=None)
    for report in reduce(whole.model, taken, asked).sites:
        site = sites_of(whole.model).by_name[report.site]
        both = taken.sites[site.name]
        assert isinstance(both, HeadMoments)
        splits = splits_at(site, taken, both, torch.device("cpu"))
        assert splits is not None
        kept_HK = kept_planes(both.energy_HD, 8)
        lost: dict[float, float] = {}
        for strength in ridges_from(asked.ridge_rel):
            for own, other in (splits, splits[::-1]):
                fitted = planes.logit_planes(logits_system(site.name, own), kept_HK, ridge_rel=strength)
                seen = logits_system(site.name, other)
                nothing = torch.zeros_like(fitted.q_map_HRD)
                left = residual_per_image(seen, fitted.q_map_HRD, fitted.k_map_HRD).sum()
                share = left / residual_per_image(seen, nothing, nothing).sum()
                lost[strength] = lost.get(strength, 0.0) + 0.5 * float(share)
        assert report.ridge_fit is not None
        assert report.ridge_fit.share_held_out == pytest.approx(min(lost.values()), rel=1e-9)
        assert lost[report.ridge_fit.strength] == pytest.approx(min(lost.values()), rel=1e-9)


# Grouped queries: heads that share keys keep the same planes, and each head's factors are in its own queries.

QUERY_HEADS, GROUPED, PLACES, KEPT = 4, 2, 9, 2


@pytest.fixture(scope="module")
def activations() -> tuple[Tensor, Tensor]:
    """Draw queries and keys [B,H,N,D] with planes of very different sizes; each two heads share their keys."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.linspace(0.3, 2.0, DIMS // 2).repeat(2)
    q = torch.randn(5, QUERY_HEADS, PLACES, DIMS, generator=draw) * sizes
    k = torch.randn(5, QUERY_HEADS // GROUPED, PLACES, DIMS, generator=draw) * sizes.flip(0)
    return q + 0.3, k.repeat_interleave(GROUPED, dim=1)


@pytest.fixture(scope="module")
def moments(activations: tuple[Tensor, Tensor]) -> HeadMoments:
    sums = HeadSums(system=True, causal=True, plane_scale=DIMS**-0.5)
    for role, x in zip(("q", "k"), activations, strict=True):
        sums.add(role, x)  # type: ignore[arg-type]
    sums.add("z", torch.randn(5, PLACES, QUERY_HEADS * DIMS))
    return sums.moments()


def require_shared(recovery: QkRecovery) -> None:
    """Require that all heads of a group keep the same planes, and that keys are selected without factors."""
    assert recovery.planes_HK is not None
    for head in range(QUERY_HEADS):
        first = head - head % GROUPED
        assert torch.equal(recovery.planes_HK[head], recovery.planes_HK[first])
        assert torch.equal(recovery.k_map_HRD[head], recovery.k_map_HRD[first])
    dims_HR = planes.dims_of_planes(recovery.planes_HK, DIMS)
    assert torch.equal(recovery.k_map_HRD, torch.nn.functional.one_hot(dims_HR, DIMS).double())


def test_each_head_attains_its_least_squares_solution(activations: tuple[Tensor, Tensor], moments: HeadMoments) -> None:
    """Each head has a complex factor for each plane, fitted by lstsq over visible pairs."""
    scores_HD = shared_by_groups(logit_energy(moments.energy_HD, moments.images), GROUPED)
    kept_HK = kept_from_scores(planes.plane_scores(scores_HD), KEPT)
    assert moments.system_HTT is not None
    recovery = planes.logit_planes(whole_system(moments.system_HTT, DIMS), kept_HK, ridge_rel=1e-13, grouped=GROUPED)
    require_shared(recovery)
    q, k = (x.double() for x in activations)
    lost = q @ k.mT - (q @ recovery.q_map_HRD.mT) @ (k @ recovery.k_map_HRD.mT).mT
    is_seen_NN = torch.ones(PLACES, PLACES, dtype=torch.bool).tril()
    for head in range(QUERY_HEADS):
        best = least_squares(q[:, head], k[:, head], kept_HK[head].tolist(), is_seen_NN)
        assert float(lost[:, head, is_seen_NN].square().sum()) == pytest.approx(best, rel=1e-6)
        assert float(recovery.residual_H[head]) == pytest.approx(best, rel=1e-6)


def test_elimination_removes_one_plane_from_all_heads_of_a_group(moments: HeadMoments) -> None:
    second = moments.q_second_HDD, moments.k_centred_HDD
    recovery = planes.eliminate_planes(*second, KEPT, ridge_rel=1e-6, grouped=GROUPED)
    require_shared(recovery)
    exact = residual_aggregated(*second, recovery.q_map_HRD, recovery.k_map_HRD)
    torch.testing.assert_close(recovery.residual_H, exact)
    alone = planes.eliminate_planes(*second, KEPT, ridge_rel=1e-6)
    assert float(alone.residual_H.sum()) <= float(recovery.residual_H.sum()) * (1 + 1e-9)


def test_exact_elimination_is_near_exhaustive_search(moments: HeadMoments) -> None:
    """Greedy elimination is compared with every pair of four planes, each with its best factors."""
    gram_HXX = moments.plane_gram_HXX
    assert gram_HXX is not None
    recovery = planes.eliminate_planes_exactly(gram_HXX, KEPT, ridge_rel=1e-12, grouped=GROUPED)
    require_shared(recovery)
    half = DIMS // 2
    for first in range(0, QUERY_HEADS, GROUPED):
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
    plain, whole = recovery.residual_uncompensated_H, torch.zeros(QUERY_HEADS, 1, DIMS, dtype=torch.float64)
    assert bool((recovery.residual_H <= plain * (1 + 1e-9)).all())
    energy = planes.residual_exact(gram_HXX, whole, whole)
    assert bool((energy >= recovery.residual_H).all())


def test_groups_rank_by_summed_scores() -> None:
    scores_HD = torch.rand(QUERY_HEADS, DIMS)
    assert shared_by_groups(scores_HD, 1) is scores_HD
    expected = torch.stack([scores_HD[head - head % 2 : head - head % 2 + 2].sum(0) for head in range(QUERY_HEADS)])
    torch.testing.assert_close(shared_by_groups(scores_HD, GROUPED), expected)
