"""Closed forms for values and the output projection at a smaller value width.

The projection reads z, all heads side by side, and gives y = W z + b. Each head's slice of z may pass through a map of
its own, folded into the value rows and their bias (attention rows sum to one, so constants pass through); W then
reads the shorter z. Errors are exact on the calibration distribution.

Legend: H heads, V dimensions of a head, C = H V, R reduced dimensions, K = H R, O outputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .channels import ChannelRecovery
from .quadratic import diagonal_blocks, explained, floored_roots, solve_ridge_toward, variance
from .scores import kept_from_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRecovery(ChannelRecovery):
    """New v = v_map v per head (rows orthonormal), new projection y' = weight [v_map z] + bias.

    residual_uncompensated: the error if as many coordinates were just dropped, those of least E[z_i^2] ||W_:,i||^2 per
    head; r2: 1 - residual / residual_uncompensated; condition, ridge: those of the joint refit.
    """

    v_map_HRV: Tensor

    def __post_init__(self) -> None:
        ChannelRecovery.__post_init__(self)
        heads, width, _ = self.v_map_HRV.shape
        assert self.weight_OK.shape[1] == heads * width, (self.weight_OK.shape, self.v_map_HRV.shape)

    @property
    def as_dense_OC(self) -> Tensor:
        """The product weight v_map: new values and projection as one projection of the dense z."""
        return self.weight_OK @ _block_diagonal(self.v_map_HRV)


def _block_diagonal(v_map_HRV: Tensor) -> Tensor:
    out_KC: Tensor = torch.block_diag(*v_map_HRV)
    return out_KC


def head_slices(weight_OC: Tensor, heads: int) -> Tensor:
    """Split the columns by head: [O, C] -> [H, O, V]."""
    return weight_OC.view(weight_OC.shape[0], heads, -1).transpose(0, 1)


def _dropping_error(second_CC: Tensor, weight_OC: Tensor, heads: int, width: int) -> float:
    """Return E||y - y'||^2 if each head keeps its `width` coordinates of most E[z_i^2] ||W_:,i||^2, nothing fitted."""
    kept_HR = kept_from_scores((second_CC.diagonal() * weight_OC.square().sum(dim=0)).view(heads, -1), width)
    change_HOV = head_slices(weight_OC, heads).clone()
    change_HOV.scatter_(2, kept_HR.unsqueeze(1).expand(-1, weight_OC.shape[0], -1), 0.0)
    return variance(change_HOV.transpose(0, 1).flatten(1), second_CC)


def keep_values(weight_OC: Tensor, bias_O: Tensor | None, heads: int) -> ValueRecovery:
    """Return the recovery at full width: identity maps and the unchanged projection."""
    head_dim = weight_OC.shape[1] // heads
    return ValueRecovery(
        v_map_HRV=torch.eye(head_dim, dtype=torch.float64, device=weight_OC.device).expand(heads, -1, -1),
        weight_OK=weight_OC.clone(),
        bias_O=weight_OC.new_zeros(weight_OC.shape[0]) if bias_O is None else bias_O.clone(),
    )


def _truncate(whitened_HOV: Tensor, root_HV: Tensor, basis_HVV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return v_map_HRV and weight_HOR, the best factors of each head's projection at rank `width`.

    They are the truncated SVD of the projection times S^1/2, in the eigenbasis of the input's covariance S. The maps'
    rows are orthonormal, so that new values have the scale of the old ones, as half precision needs.
    """
    outputs, head_dim = whitened_HOV.shape[1:]
    # With fewer outputs than values some directions are not read: rows of zeros put them last.
    whole_HOV = F.pad(whitened_HOV, (0, 0, 0, max(head_dim - outputs, 0)))
    u_HOV, s_HV, vt_HVV = torch.linalg.svd(whole_HOV, full_matrices=False)
    u_HOV = u_HOV[:, :outputs]
    rows_HRV = (vt_HVV[:, :width] / root_HV.unsqueeze(1)) @ basis_HVV.mT
    q_HVR, r_HRR = torch.linalg.qr(rows_HRV.mT)
    return q_HVR.mT, (u_HOV[:, :, :width] * s_HV[:, None, :width]) @ r_HRR.mT


def _sweep_heads(
    covariance_CC: Tensor, weight_OC: Tensor, v_map_HRV: Tensor, new_OK: Tensor, ridge_rel: float
) -> tuple[Tensor, Tensor]:
    """Refit each head in turn to the output left by the others, by ridge toward its own map; return maps and weight."""
    _, width, head_dim = v_map_HRV.shape
    v_map_HRV, new_OK = v_map_HRV.clone(), new_OK.clone()
    left_OC = weight_OC - new_OK @ _block_diagonal(v_map_HRV)
    for head, v_map_RV in enumerate(v_map_HRV):
        own, new = slice(head * head_dim, (head + 1) * head_dim), slice(head * width, (head + 1) * width)
        had_OV = new_OK[:, new] @ v_map_RV
        left_OC[:, own] += had_OV
        moment_VV = covariance_CC[own, own].clone()
        ridge = ridge_rel * float(moment_VV.diagonal().mean())
        moment_VV.diagonal().add_(ridge)
        cross_OV = left_OC @ covariance_CC[:, own] + ridge * had_OV
        root_1V, basis_1VV = floored_roots(moment_VV.unsqueeze(0), 1e-12)
        maps_1RV, cut_1OR = _truncate((cross_OV @ basis_1VV) / root_1V.unsqueeze(1), root_1V, basis_1VV, width)
        v_map_HRV[head], new_OK[:, new] = maps_1RV[0], cut_1OR[0]
        left_OC[:, own] -= new_OK[:, new] @ v_map_HRV[head]
    return v_map_HRV, new_OK


_FLOOR_REL = 1e-6
_NOISE = 4.0  # the whole covariance's least eigenvalue is assumed above this many times that of the heads' blocks


def _raise_eigenvalues(covariance_CC: Tensor, heads: int) -> Tensor:
    """Return the covariance, with a constant added to its diagonal if a head's own block has an eigenvalue below zero.

    Rounding of float32 sums gives such eigenvalues where z varies little compared with its mean; a solve with them
    amplifies noise.
    """
    least = float(torch.linalg.eigvalsh(diagonal_blocks(covariance_CC, heads)).amin())
    if least >= 0.0:
        return covariance_CC
    raised_CC = covariance_CC.clone()
    raised_CC.diagonal().sub_(_NOISE * least)
    return raised_CC


def lowrank_values(
    mean_C: Tensor,
    second_CC: Tensor,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    heads: int,
    width: int,
    *,
    ridge_rel: float,
    sweeps: int = 1,
) -> ValueRecovery:
    """Truncate the SVD of W_O,h S_z,h^1/2 per head, refit the projection over all heads, fold the mean into the bias.

    The refit is a ridge toward the truncated weights W': with M the block-diagonal matrix of all maps and C the
    covariance of z, W' + (W - W' M) C M' (M C M' + ridge I)^-1, ridge = ridge_rel * mean diagonal of M C M'. Each of
    the `sweeps` fits each head's map again to the residual of the other heads and repeats the refit; no step raises the
    error. Eigenvalues of S_z,h are raised to _FLOOR_REL * their mean.
    """
    covariance_CC = _raise_eigenvalues(second_CC - torch.outer(mean_C, mean_C), heads)
    root_HV, basis_HVV = floored_roots(diagonal_blocks(covariance_CC, heads), _FLOOR_REL)
    whitened_HOV = (head_slices(weight_OC, heads) @ basis_HVV) * root_HV.unsqueeze(1)
    v_map_HRV, cut_HOR = _truncate(whitened_HOV, root_HV, basis_HVV, width)
    solved = solve_ridge_toward(
        cut_HOR.transpose(0, 1).flatten(1), weight_OC, covariance_CC, _block_diagonal(v_map_HRV), ridge_rel=ridge_rel
    )
    for _ in range(sweeps):
        v_map_HRV, swept_OK = _sweep_heads(covariance_CC, weight_OC, v_map_HRV, solved.solution_OK, ridge_rel)
        solved = solve_ridge_toward(swept_OK, weight_OC, covariance_CC, _block_diagonal(v_map_HRV), ridge_rel=ridge_rel)
    new_OK = solved.solution_OK
    change_OC = weight_OC - new_OK @ _block_diagonal(v_map_HRV)
    old_O = weight_OC.new_zeros(weight_OC.shape[0]) if bias_O is None else bias_O
    residual, dropped = variance(change_OC, covariance_CC), _dropping_error(second_CC, weight_OC, heads, width)
    return ValueRecovery(
        v_map_HRV=v_map_HRV,
        weight_OK=new_OK,
        bias_O=old_O + change_OC @ mean_C,
        residual=residual,
        residual_uncompensated=dropped,
        r2=explained(residual, dropped),
        condition=solved.condition,
        ridge=solved.ridge,
    )


def lowrank_spectrum(mean_C: Tensor, second_CC: Tensor, weight_OC: Tensor, heads: int) -> Tensor:
    """Return the loss [H, V + 1] of truncating each head to widths 0..V, the others dense, without a refit."""
    covariance_HVV = diagonal_blocks(second_CC - torch.outer(mean_C, mean_C), heads)
    value_HV, basis_HVV = torch.linalg.eigh(covariance_HVV)
    rooted_HOV = (head_slices(weight_OC, heads) @ basis_HVV) * value_HV.clamp_min(0.0).sqrt().unsqueeze(1)
    tail_HV = torch.linalg.svdvals(rooted_HOV).square().flip(1).cumsum(1).flip(1)
    return torch.cat((tail_HV, torch.zeros_like(tail_HV[:, :1])), dim=1)
