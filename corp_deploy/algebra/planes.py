"""Closed forms for queries and keys that positions rotate (RoPE): whole planes are kept, each with a complex factor.

A plane p of P is the dimensions p and p + P of a head; a token's position rotates it by an angle of its own. Only a
number a + bi per plane commutes with all of those rotations, so with q' = (a + bi) q on the kept planes, applied to the
weights before rotation, the logits lose Q E K', where E is the identity on removed planes and
(1 - a) I + (0 - b) [[0, 1], [-1, 0]] on the others. That is a quadratic in the 2 P lost numbers, written down once:

    loss = x' G x + 2 t' x + e,   x = (1 - a_1, .., 1 - a_P, -b_1, .., -b_P), (1, 0) on removed planes

from second moments of all tokens (aggregated), or from CORP's per-image system (eq. 15), both of rotated q and k.

Where `grouped` consecutive heads share their keys they keep the same planes, and each head's factors are all in its
own queries: keys are only selected, and nothing is lost by it.

Legend: H heads, D = 2 P dimensions, K planes kept, X = 2 P numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .image_system import ImageSystem, pair_index
from .quadratic import solve_ridge
from .queries_keys import QkRecovery, judge_maps, residual_aggregated, residual_per_image
from .scores import kept_from_scores, selection, shared_by_groups

# A factor's part as (row, column, sign) within a plane: the identity, and [[0, 1], [-1, 0]].
_PARTS = (((0, 0, 1.0), (1, 1, 1.0)), ((0, 1, 1.0), (1, 0, -1.0)))

Product = Callable[[int, int, int, int], Tensor]
"""A function of (d, a, c, e): the sum [.., P, P] over planes p and t of Q[(d, t), (a, p)] K[(c, p), (e, t)], second
moments of q and of k by half and plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLoss:
    """The loss x' G x + 2 t' x of each head, in the module's terms without e: `gram_HXX` is G, `cross_HX` is t."""

    gram_HXX: Tensor
    cross_HX: Tensor

    @property
    def planes(self) -> int:
        return self.cross_HX.shape[1] // 2


def dims_of_planes(planes_HK: Tensor, dims: int) -> Tensor:
    """Return the dimensions [H,2K] of a head's planes: the first one of each plane, then the second ones."""
    return torch.cat((planes_HK, planes_HK + dims // 2), dim=1)


def plane_scores(score_HD: Tensor) -> Tensor:
    """Return the score of each plane [H,P]: the sum of its two dimensions' scores."""
    first_HP, second_HP = score_HD.chunk(2, dim=1)
    return first_HP + second_HP


def _gram(product: Product) -> Tensor:
    """Return G [.., X, X]: tr(Q B K C') for every two of the matrices B, C that the numbers of x multiply in E."""

    def block(one: int, other: int) -> Tensor:
        terms = [
            (sign * other_sign) * product(d, a, c, e)
            for a, c, sign in _PARTS[one]
            for d, e, other_sign in _PARTS[other]
        ]
        return torch.stack(terms).sum(dim=0)

    return torch.cat([torch.cat([block(one, other) for other in (0, 1)], dim=-1) for one in (0, 1)], dim=-2)


def aggregated_loss(q_second_HDD: Tensor, k_second_HDD: Tensor) -> PlaneLoss:
    """Return the loss tr(S_q E S_k E') of each head from S_q and S_k, the second moments of rotated q and k."""
    planes = q_second_HDD.shape[1] // 2
    q_H2P2P, k_H2P2P = (
        each.unflatten(2, (2, planes)).unflatten(1, (2, planes)) for each in (q_second_HDD, k_second_HDD)
    )

    def product(d: int, a: int, c: int, e: int) -> Tensor:
        product_HPP: Tensor = q_H2P2P[:, d, :, a].mT * k_H2P2P[:, c, :, e]
        return product_HPP

    return exact_loss(_gram(product))


def exact_loss(gram_HXX: Tensor) -> PlaneLoss:
    """Return the loss with this gram and t = 0, such as calib's sums of the attention's KL to second order."""
    return PlaneLoss(gram_HXX=0.5 * (gram_HXX + gram_HXX.mT), cross_HX=gram_HXX.new_zeros(gram_HXX.shape[:2]))


def residual_exact(gram_HXX: Tensor, q_map_HRD: Tensor, k_map_HRD: Tensor) -> Tensor:
    """Return x' G x [H] for maps of q and k that this file builds; a plane whose maps are zero counts as removed."""
    planes = gram_HXX.shape[1] // 2
    lost_HDD = -(q_map_HRD.mT @ k_map_HRD)
    real_HP = 1.0 + lost_HDD.diagonal(dim1=1, dim2=2)[:, :planes]
    x_HX = torch.cat((real_HP, lost_HDD[:, :planes, planes:].diagonal(dim1=1, dim2=2)), dim=1)
    return torch.einsum("hx,hxy,hy->h", x_HX, gram_HXX, x_HX).clamp_min(0.0)


def covered_planes(system: ImageSystem) -> Tensor:
    """Return the planes [H,C] that a system covers, ascending; it must cover both dimensions of each."""
    return system.covered_HS[:, : system.covered_HS.shape[1] // 2]


def image_loss(system: ImageSystem) -> PlaneLoss:
    """Return the sum over images of ||Q E K'||_F^2 on the planes that the system covers.

    E is the identity on all other planes.
    """
    planes = covered_planes(system).shape[1]
    pair_SS = pair_index(2 * planes, system.system_HTT.device)

    def product(d: int, a: int, c: int, e: int) -> Tensor:
        q_PP = pair_SS[d * planes : (d + 1) * planes, a * planes : (a + 1) * planes].T
        k_PP = pair_SS[c * planes : (c + 1) * planes, e * planes : (e + 1) * planes]
        return system.system_HTT[:, k_PP, q_PP]

    first_HSS, second_HSS = system.target_HSS[:, :planes], system.target_HSS[:, planes:]
    real_HP = first_HSS[:, :, :planes].diagonal(dim1=1, dim2=2) + second_HSS[:, :, planes:].diagonal(dim1=1, dim2=2)
    other_HP = first_HSS[:, :, planes:].diagonal(dim1=1, dim2=2) - second_HSS[:, :, :planes].diagonal(dim1=1, dim2=2)
    return replace(exact_loss(_gram(product)), cross_HX=torch.cat((real_HP, other_HP), dim=1))


def _fit_factors(loss: PlaneLoss, kept_HK: Tensor, ridge_rel: float) -> tuple[Tensor, float, float]:
    """Return the factors [H,K,2] of least loss, one complex number per kept plane, and the worst condition and ridge.

    ridge_rel * the mean diagonal of G over the kept planes pulls the factors toward 1.
    """
    factors, conditions, ridges = [], [], []
    for gram_XX, cross_X, kept_K in zip(loss.gram_HXX, loss.cross_HX, kept_HK, strict=True):
        lost_P = torch.ones(loss.planes, dtype=gram_XX.dtype, device=gram_XX.device).index_fill(0, kept_K, 0.0)
        at_X = torch.cat((kept_K, kept_K + loss.planes))
        given_X = (gram_XX[:, : loss.planes] @ lost_P + cross_X)[at_X]
        solved = solve_ridge(-given_X[None], gram_XX[at_X[:, None], at_X], ridge_rel=ridge_rel)
        one_less_a_K, minus_b_K = solved.solution_OK[0].chunk(2)
        factors.append(torch.stack((1.0 - one_less_a_K, -minus_b_K), dim=1))
        conditions.append(solved.condition)
        ridges.append(solved.ridge)
    return torch.stack(factors), max(conditions), max(ridges)


def _build_maps(factor_HK2: Tensor, kept_HK: Tensor, dims: int, grouped: int) -> tuple[Tensor, Tensor]:
    """Return the maps [H,2K,D] of q and of k.

    Both scale by the root of a factor's modulus, and q turns by the factor's angle. With grouped keys q takes the whole
    factor.
    """
    a_HK1, b_HK1 = factor_HK2.split(1, dim=2)
    root_HK1 = torch.linalg.vector_norm(factor_HK2, dim=2, keepdim=True).sqrt()
    root_HK1 = root_HK1 if grouped == 1 else torch.ones_like(root_HK1)
    safe_HK1 = root_HK1.clamp_min(torch.finfo(root_HK1.dtype).tiny)
    a_HK1, b_HK1 = a_HK1 / safe_HK1, b_HK1 / safe_HK1
    one_HKD, other_HKD = (
        torch.nn.functional.one_hot(each, dims).to(factor_HK2.dtype) for each in (kept_HK, kept_HK + dims // 2)
    )
    q_map = torch.cat((a_HK1 * one_HKD - b_HK1 * other_HKD, b_HK1 * one_HKD + a_HK1 * other_HKD), dim=1)
    return q_map, torch.cat((root_HK1 * one_HKD, root_HK1 * other_HKD), dim=1)


def order_planes(gram_HXX: Tensor, *, ridge_rel: float, grouped: int = 1) -> Tensor:
    """Return the planes of each head [H,P] in the order of their removal, greedy and backward.

    The factors of the planes left are fitted anew after each removal (optimal brain surgeon in pairs): removing p costs
    theta_p' [(G + ridge)^-1]_pp^-1 theta_p, for heads that share keys the sum.
    """
    heads, planes = len(gram_HXX), gram_HXX.shape[1] // 2
    ridge_H = ridge_rel * gram_HXX.diagonal(dim1=1, dim2=2).mean(dim=1)
    shift_H11 = torch.where(ridge_H > 0.0, ridge_H, 1.0)[:, None, None]  # a head of zeros takes any ridge
    identity_XX = torch.eye(2 * planes, dtype=gram_HXX.dtype, device=gram_HXX.device)
    inverse_HXX = torch.linalg.pinv(gram_HXX + shift_H11 * identity_XX, hermitian=True)
    theta_HX = gram_HXX.new_zeros(heads, 2 * planes)
    theta_HX[:, :planes] = 1.0
    gone_HP = torch.zeros(heads, planes, dtype=torch.bool, device=theta_HX.device)
    each_H = torch.arange(heads, device=theta_HX.device)
    order = []
    for _ in range(planes):
        diagonal_HXX = inverse_HXX.view(heads, 2, planes, 2, planes).diagonal(dim1=2, dim2=4).permute(0, 3, 1, 2)
        theta_HP2 = theta_HX.view(heads, 2, planes).mT
        metric_HP22 = torch.linalg.pinv(diagonal_HXX, hermitian=True)
        cost_HP = torch.einsum("hpi,hpij,hpj->hp", theta_HP2, metric_HP22, theta_HP2).clamp_min(0.0)
        pick_H = shared_by_groups(cost_HP, grouped).masked_fill(gone_HP, torch.inf).argmin(dim=1)
        at_H2 = torch.stack((pick_H, pick_H + planes), dim=1)
        columns_HX2 = inverse_HXX.gather(2, at_H2[:, None, :].expand(-1, 2 * planes, -1))
        metric_H22 = metric_HP22[each_H, pick_H]
        theta_HX = theta_HX - (columns_HX2 @ metric_H22 @ theta_HP2[each_H, pick_H, :, None]).squeeze(2)
        inverse_HXX = inverse_HXX - columns_HX2 @ metric_H22 @ columns_HX2.mT
        inverse_HXX = 0.5 * (inverse_HXX + inverse_HXX.mT)
        inverse_HXX[each_H[:, None], at_H2] = 0.0
        inverse_HXX[each_H[:, None], :, at_H2] = 0.0
        theta_HX = theta_HX.scatter(1, at_H2, 0.0)
        gone_HP[each_H, pick_H] = True
        order.append(pick_H)
    return torch.stack(order, dim=1)


def _last_planes(order_HP: Tensor, planes: int) -> Tensor:
    """Return the last `planes` planes [H,K] of an order of removal, ascending."""
    return order_HP[:, order_HP.shape[1] - planes :].sort(dim=1).values


def _judge_factors(
    fitted: tuple[Tensor, float, float],
    kept_HK: Tensor,
    plain_HK: Tensor,
    dims: int,
    grouped: int,
    residual: Callable[[Tensor, Tensor], Tensor],
) -> QkRecovery:
    """Return the recovery with the planes `kept_HK` and fitted factors, with its residual.

    The uncompensated case keeps the planes `plain_HK` unchanged. `residual` takes the maps of q and of k.
    """
    factor_HK2, condition, ridge = fitted
    maps, plain = _build_maps(factor_HK2, kept_HK, dims, grouped), selection(dims_of_planes(plain_HK, dims), dims)
    own = judge_maps(maps, residual(*maps), residual(plain, plain), condition=condition, ridge=ridge)
    return replace(own, planes_HK=kept_HK)


def fit_aggregated(
    q_second_HDD: Tensor, k_second_HDD: Tensor, kept_HK: Tensor, plain_HK: Tensor, *, ridge_rel: float, grouped: int
) -> QkRecovery:
    """Return the recovery with the planes `kept_HK`, their factors fitted on the aggregated objective.

    Heads for which the fit loses more than the planes `plain_HK` unchanged, the uncompensated case, keep those, heads
    that share keys together. CORP's first version fits so, with planes of its own and second moments of all tokens.
    """
    dims, residual = q_second_HDD.shape[1], partial(residual_aggregated, q_second_HDD, k_second_HDD)
    fitted = _fit_factors(aggregated_loss(q_second_HDD, k_second_HDD), kept_HK, ridge_rel)
    own = _judge_factors(fitted, kept_HK, plain_HK, dims, grouped, residual)
    plain, plain_H = selection(dims_of_planes(plain_HK, dims), dims), own.residual_uncompensated_H
    worse_H = shared_by_groups((own.residual_H - plain_H).unsqueeze(1), grouped).squeeze(1) > 0.0
    q_map, k_map = (torch.where(worse_H[:, None, None], plain, each) for each in (own.q_map_HRD, own.k_map_HRD))
    residual_H = torch.where(worse_H, plain_H, own.residual_H)
    chosen = judge_maps((q_map, k_map), residual_H, plain_H, condition=own.condition, ridge=own.ridge)
    return replace(chosen, planes_HK=torch.where(worse_H[:, None], plain_HK, kept_HK))


def eliminate_planes(
    q_second_HDD: Tensor, k_second_HDD: Tensor, planes: int, *, ridge_rel: float, grouped: int = 1
) -> QkRecovery:
    """Return the recovery that keeps `planes` planes of each head by greedy elimination on the aggregated objective.

    Pass k's second moment centred per image.
    """
    gram_HXX = aggregated_loss(q_second_HDD, k_second_HDD).gram_HXX
    kept_HK = _last_planes(order_planes(gram_HXX, ridge_rel=ridge_rel, grouped=grouped), planes)
    energy_HD = q_second_HDD.diagonal(dim1=1, dim2=2) * k_second_HDD.diagonal(dim1=1, dim2=2)
    plain_HK = kept_from_scores(shared_by_groups(plane_scores(energy_HD), grouped), planes)
    return fit_aggregated(q_second_HDD, k_second_HDD, kept_HK, plain_HK, ridge_rel=ridge_rel, grouped=grouped)


def eliminate_planes_exactly(gram_HXX: Tensor, planes: int, *, ridge_rel: float, grouped: int = 1) -> QkRecovery:
    """Return the recovery that keeps `planes` planes of each head by greedy elimination on the loss x' G x.

    The uncompensated case keeps, unchanged, the planes whose removal alone would change attention most.
    """
    loss = exact_loss(gram_HXX)
    kept_HK = _last_planes(order_planes(loss.gram_HXX, ridge_rel=ridge_rel, grouped=grouped), planes)
    fitted, dims = _fit_factors(loss, kept_HK, ridge_rel), gram_HXX.shape[1]
    own_HP = loss.gram_HXX.diagonal(dim1=1, dim2=2)[:, : dims // 2]
    plain_HK = kept_from_scores(shared_by_groups(own_HP, grouped), planes)
    return _judge_factors(fitted, kept_HK, plain_HK, dims, grouped, partial(residual_exact, loss.gram_HXX))


def logit_planes(system: ImageSystem, kept_HK: Tensor, *, ridge_rel: float, grouped: int = 1) -> QkRecovery:
    """Fit the M with which Q_S M K_S' replaces every image's missing logits (CORP, eq. 14-16), as factors of planes.

    The system has to cover the planes.
    """
    inside_HK = torch.searchsorted(covered_planes(system).contiguous(), kept_HK.contiguous())
    fitted = _fit_factors(image_loss(system), inside_HK, ridge_rel)
    return _judge_factors(fitted, kept_HK, kept_HK, system.head_dim, grouped, partial(residual_per_image, system))
