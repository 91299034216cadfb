"""The choice of whole heads of an attention to remove, and its new output projection.

The projection reads z, all heads side by side, and gives y = W z + b. Fewer heads give z' = R z with R = M (x) I_V: a
row of M picks a head, or averages the heads of a cluster (GRAIL, sections 3.1 and 3.2). Where groups of query heads
share keys and values M is block-diagonal, a block a group. Errors are exact on the calibration distribution if the
projection's input really is R z: for picked heads, not for folded ones, whose softmax is of mean rows.

Legend: H heads, G groups of heads that share keys and values, M heads left, V dimensions of a head, C = H V, K = M V,
O outputs.
"""

from typing import Literal

import torch
from torch import Tensor

from .channels import ChannelRecovery
from .quadratic import RidgeSolution, diagonal_blocks, explained, solve_ridge_toward, variance
from .values import head_slices

Form = Literal["none", "gram", "affine"]


def output_energy(second_CC: Tensor, weight_OC: Tensor, heads: int) -> Tensor:
    """Return tr(W_h G_hh W_h') [H]: the energy of each head's own output (GRAIL)."""
    weight_HOV, second_HVV = head_slices(weight_OC, heads), diagonal_blocks(second_CC, heads)
    score_H: Tensor = ((weight_HOV @ second_HVV) * weight_HOV).sum(dim=(1, 2)).clamp_min(0.0)
    return score_H


def weight_energy(weight_OC: Tensor, heads: int) -> Tensor:
    """Return the squared norm of each head's columns of the projection [H]."""
    return weight_OC.square().sum(dim=0).view(heads, -1).sum(dim=1)


def recover_projection(
    mean_C: Tensor,
    second_CC: Tensor,
    weight_OC: Tensor,
    bias_O: Tensor | None,
    map_MH: Tensor,
    form: Form,
    *,
    ridge_rel: float,
) -> ChannelRecovery:
    """Return the projection that reads the heads left, z' = R z, and its errors.

    With S the sum of W's columns over each cluster, G the second moment and C the covariance of z:

    * `none`: S;
    * `gram`: W G R' (R G R' + ridge I)^-1, with the bias unchanged (GRAIL, as published);
    * `affine`: S + (W - S R) C R' (R C R' + ridge I)^-1, with the mean of the lost part added to the bias; it is W if
      all heads are left.

    ridge = ridge_rel * mean diagonal of the matrix that it is added to.
    """
    eye_VV = torch.eye(weight_OC.shape[1] // map_MH.shape[1], dtype=torch.float64, device=weight_OC.device)
    map_KC = torch.kron(map_MH.contiguous(), eye_VV)
    covariance_CC = second_CC - torch.outer(mean_C, mean_C)
    old_O = weight_OC.new_zeros(len(weight_OC)) if bias_O is None else bias_O
    plain_OK, new_O = weight_OC @ (map_KC > 0.0).to(torch.float64).T, old_O.clone()
    solved = RidgeSolution(solution_OK=plain_OK)
    if form == "gram":
        solved = solve_ridge_toward(torch.zeros_like(plain_OK), weight_OC, second_CC, map_KC, ridge_rel=ridge_rel)
    elif form == "affine":
        solved = solve_ridge_toward(plain_OK, weight_OC, covariance_CC, map_KC, ridge_rel=ridge_rel)
    new_OK = solved.solution_OK
    if form == "affine":
        new_O = old_O + (weight_OC - new_OK @ map_KC) @ mean_C
    change_OC, plain_change_OC = weight_OC - new_OK @ map_KC, weight_OC - plain_OK @ map_KC
    left, dropped = variance(change_OC, covariance_CC), variance(plain_change_OC, covariance_CC)
    return ChannelRecovery(
        weight_OK=new_OK,
        bias_O=new_O,
        residual=left + float((change_OC @ mean_C + old_O - new_O).square().sum()),
        residual_uncompensated=dropped + float((plain_change_OC @ mean_C).square().sum()),
        r2=explained(left, dropped),
        condition=solved.condition,
        ridge=solved.ridge,
    )
