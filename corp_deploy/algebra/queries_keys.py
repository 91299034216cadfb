"""Four closed forms for queries and keys at a smaller head width.

Each returns, per head, the maps that q and k go through (weights and biases with them); the softmax scale stays that of
the dense head. With E = I - q_map' k_map the logits lose Q E K', and a recovery is judged on its own objective:

* `per-image`: sum over images of ||Q_b E K_b'||_F^2, exact, from the summed products of images (CORP, eq. 14-17);
* `aggregated`: tr(S_q E S_k E'), from second moments over all tokens.

Legend: H heads, D dimensions of a head, R reduced dimensions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .image_system import ImageSystem, logit_system, lost_per_image
from .quadratic import explained, floored_roots, solve_ridge
from .scores import kept_from_scores, selection

MOST_APART = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class QkRecovery:
    """New q = q_map q, new k = k_map k, per head.

    residual_H: the objective at the result; residual_uncompensated_H: the same with nothing fitted;
    r2: 1 - their ratio, summed over heads (eq. 93); condition: the worst head's; ridge: the largest head's.
    planes_HK: the kept planes of each head, where planes are kept or removed whole (see planes.py).
    """

    q_map_HRD: Tensor
    k_map_HRD: Tensor
    residual_H: Tensor
    residual_uncompensated_H: Tensor
    r2: float
    condition: float
    ridge: float
    planes_HK: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.q_map_HRD.shape == self.k_map_HRD.shape, (self.q_map_HRD.shape, self.k_map_HRD.shape)
        assert bool((self.residual_H >= 0.0).all()), self.residual_H


def judge_maps(
    maps: tuple[Tensor, Tensor], residual_H: Tensor, uncompensated_H: Tensor, *, condition: float, ridge: float
) -> QkRecovery:
    """Return the recovery with these maps of q and of k, both residuals, and the r2 that follows from them."""
    return QkRecovery(
        q_map_HRD=maps[0],
        k_map_HRD=maps[1],
        residual_H=residual_H,
        residual_uncompensated_H=uncompensated_H,
        r2=explained(float(residual_H.sum()), float(uncompensated_H.sum())),
        condition=condition,
        ridge=ridge,
    )


def _identity(like_HDD: Tensor) -> Tensor:
    return torch.eye(like_HDD.shape[-1], dtype=torch.float64, device=like_HDD.device)


def _lost(q_map_HRD: Tensor, k_map_HRD: Tensor) -> Tensor:
    """Return E = I - q_map' k_map."""
    return _identity(q_map_HRD) - q_map_HRD.mT @ k_map_HRD


def residual_aggregated(q_second_HDD: Tensor, k_second_HDD: Tensor, q_map_HRD: Tensor, k_map_HRD: Tensor) -> Tensor:
    """Return tr(S_q E S_k E') per head: the aggregated objective of any maps."""
    lost_HDD = _lost(q_map_HRD, k_map_HRD)
    return ((q_second_HDD @ lost_HDD @ k_second_HDD) * lost_HDD).sum(dim=(1, 2)).clamp_min(0.0)


def residual_per_image(system: ImageSystem, q_map_HRD: Tensor, k_map_HRD: Tensor) -> Tensor:
    """Return the sum over images of ||Q_b E K_b'||_F^2 per head, for any maps that the system covers."""
    assert system.covers(q_map_HRD), system.covered_HS
    assert system.covers(k_map_HRD), system.covered_HS
    return lost_per_image(system, _lost(q_map_HRD, k_map_HRD))


def select(kept_HR: Tensor, *, q_second_HDD: Tensor, k_second_HDD: Tensor) -> QkRecovery:
    """Return the recovery that keeps these dimensions unchanged, judged on the aggregated objective; its r2 is 0."""
    map_HRD = selection(kept_HR, q_second_HDD.shape[-1])
    residual_H = residual_aggregated(q_second_HDD, k_second_HDD, map_HRD, map_HRD)
    return replace(judge_maps((map_HRD, map_HRD), residual_H, residual_H.clone(), condition=1.0, ridge=0.0), r2=0.0)


def _fold_maps(m_HRR: Tensor, kept_HR: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Fold I + M = U S V' into maps: q_map = (U S^1/2)' on the kept rows, k_map = (V S^1/2)' (eq. 16)."""
    u_HRR, s_HR, vt_HRR = torch.linalg.svd(_identity(m_HRR) + m_HRR)
    root_HR1 = s_HR.sqrt().unsqueeze(-1)
    rows_HRD = selection(kept_HR, head_dim)
    return (root_HR1 * u_HRR.mT) @ rows_HRD, (root_HR1 * vt_HRR) @ rows_HRD


def logit(system: ImageSystem, kept_HR: Tensor, *, ridge_rel: float) -> QkRecovery:
    """Replace every image's missing logits by Q_S M K_S', and fold I + M into maps by its SVD (CORP, eq. 14-16).

    ridge = ridge_rel * mean diagonal of G. The residual is eq. 81, on the per-image objective.
    """
    ms, residuals, missing, conditions, ridges = [], [], [], [], []
    for head, kept_R in enumerate(kept_HR):
        of_head = logit_system(system, head, kept_R)
        solved = solve_ridge(of_head.cross.unsqueeze(0), of_head.gram, ridge_rel=ridge_rel)
        m = solved.solution_OK.squeeze(0)
        residuals.append(max(of_head.missing - 2.0 * float(m @ of_head.cross) + float(m @ (of_head.gram @ m)), 0.0))
        ms.append(m.view(kept_R.numel(), kept_R.numel()).T)
        missing.append(of_head.missing)
        conditions.append(solved.condition)
        ridges.append(solved.ridge)
    residual_H = system.energy_H.new_tensor(residuals)
    uncompensated_H = system.energy_H.new_tensor(missing)
    maps = _fold_maps(torch.stack(ms), kept_HR, system.head_dim)
    return judge_maps(maps, residual_H, uncompensated_H, condition=max(conditions), ridge=max(ridges))


def logit_v1(q_second_HDD: Tensor, k_second_HDD: Tensor, kept_HR: Tensor, *, ridge_rel: float) -> QkRecovery:
    """Recover by CORP's first version, on summed Grams: solve S_q,SS M S_k,SS + ridge M = S_q,SP S_k,PS for M.

    It is solved in the eigenbases of both. ridge = ridge_rel * mean diagonal of S_k,SS (x) S_q,SS. M has no component
    in directions in which that product and the ridge both vanish.
    """
    head_dim = q_second_HDD.shape[-1]
    rows_HRD = selection(kept_HR, head_dim)
    pruned_HDD = _identity(rows_HRD) - rows_HRD.mT @ rows_HRD
    q_HRR, k_HRR = (rows_HRD @ each @ rows_HRD.mT for each in (q_second_HDD, k_second_HDD))
    cross_HRR = rows_HRD @ q_second_HDD @ pruned_HDD @ k_second_HDD @ rows_HRD.mT
    q_value_HR, q_basis_HRR = torch.linalg.eigh(q_HRR)
    k_value_HR, k_basis_HRR = torch.linalg.eigh(k_HRR)
    ridge_H = ridge_rel * q_HRR.diagonal(dim1=1, dim2=2).mean(1) * k_HRR.diagonal(dim1=1, dim2=2).mean(1)
    values_HRR = (
        q_value_HR.clamp_min(0.0).unsqueeze(2) * k_value_HR.clamp_min(0.0).unsqueeze(1) + ridge_H[:, None, None]
    )
    largest_H11 = values_HRR.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    inverse_HRR = torch.where(values_HRR > 1e-14 * largest_H11, 1.0 / values_HRR, 0.0)
    m_HRR = q_basis_HRR @ ((q_basis_HRR.mT @ cross_HRR @ k_basis_HRR) * inverse_HRR) @ k_basis_HRR.mT
    maps = _fold_maps(m_HRR, kept_HR, head_dim)
    residual_H = residual_aggregated(q_second_HDD, k_second_HDD, *maps)
    uncompensated_H = residual_aggregated(q_second_HDD, k_second_HDD, rows_HRD, rows_HRD)
    smallest_H = values_HRR.amin(dim=(1, 2)).clamp_min(torch.finfo(torch.float64).eps * largest_H11.flatten())
    condition = float((largest_H11.flatten() / smallest_H).max())
    return judge_maps(maps, residual_H, uncompensated_H, condition=condition, ridge=float(ridge_H.max()))


def _roots(second_HDD: Tensor, floor_rel: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return S^1/2, S^-1/2 and the ratio of the extreme eigenvalues, none below floor_rel * the mean one."""
    root_HD, basis_HDD = floored_roots(second_HDD, floor_rel)
    root_HDD = (basis_HDD * root_HD.unsqueeze(1)) @ basis_HDD.mT
    inverse_HDD = (basis_HDD / root_HD.unsqueeze(1)) @ basis_HDD.mT
    return root_HDD, inverse_HDD, (root_HD[:, -1] / root_HD[:, 0]).square()


def lowrank(q_second_HDD: Tensor, k_second_HDD: Tensor, width: int, *, floor_rel: float = 1e-6) -> QkRecovery:
    """Return the best maps of rank `width` on the aggregated objective; they mix all dimensions (Eckart-Young).

    S_q^1/2 S_k^1/2 = U S V': q_map = (S_q^-1/2 U_r S_r^1/2)', k_map = (S_k^-1/2 V_r S_r^1/2)'. Pass k's second moment
    centred per image: softmax ignores a constant along a query's row. Eigenvalues are raised to floor_rel * their mean,
    so that directions without calibration data stay represented and full width gives back every logit. The
    uncompensated case drops the dimensions of least energy. A head takes that case if it loses no more by it, as where
    its logits are equal for all keys.
    """
    q_root_HDD, q_inverse_HDD, q_condition_H = _roots(q_second_HDD, floor_rel)
    k_root_HDD, k_inverse_HDD, k_condition_H = _roots(k_second_HDD, floor_rel)
    u_HDD, s_HD, vt_HDD = torch.linalg.svd(q_root_HDD @ k_root_HDD)
    root_HR1 = s_HD[:, :width].sqrt().unsqueeze(-1)
    q_map_HRD = root_HR1 * (u_HDD[:, :, :width].mT @ q_inverse_HDD)
    k_map_HRD = root_HR1 * (vt_HDD[:, :width] @ k_inverse_HDD)
    q_map_HRD, k_map_HRD = _balance_norms(q_map_HRD, k_map_HRD)
    residual_H = residual_aggregated(q_second_HDD, k_second_HDD, q_map_HRD, k_map_HRD)

    energy_HD = q_second_HDD.diagonal(dim1=1, dim2=2) * k_second_HDD.diagonal(dim1=1, dim2=2)
    plain_HRD = selection(kept_from_scores(energy_HD, width), energy_HD.shape[1])
    plain_H = residual_aggregated(q_second_HDD, k_second_HDD, plain_HRD, plain_HRD)
    worse_H11 = (residual_H >= plain_H)[:, None, None]
    maps = torch.where(worse_H11, plain_HRD, q_map_HRD), torch.where(worse_H11, plain_HRD, k_map_HRD)
    condition = float(torch.maximum(q_condition_H, k_condition_H).max())
    ridge = floor_rel * float(q_second_HDD.diagonal(dim1=1, dim2=2).mean(1).max())
    return judge_maps(maps, torch.minimum(residual_H, plain_H), plain_H, condition=condition, ridge=ridge)


def _balance_norms(q_map_HRD: Tensor, k_map_HRD: Tensor) -> tuple[Tensor, Tensor]:
    """Scale one map up and the other down, with the same logits, until their norms differ at most MOST_APART times.

    Keys that hardly vary would otherwise get a map that no float32 holds.
    """
    apart_H = k_map_HRD.norm(dim=(1, 2)) / q_map_HRD.norm(dim=(1, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    factor_H = (apart_H / apart_H.clamp(1.0 / MOST_APART, MOST_APART)).sqrt()
    factor_H11 = torch.where(apart_H > 0.0, factor_H, 1.0)[:, None, None]
    return q_map_HRD * factor_H11, k_map_HRD / factor_H11
