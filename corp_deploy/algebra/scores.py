"""Scores that rank what to keep, and the ranking itself.

Legend: F hidden channels of an MLP, I its inputs, O its outputs, H heads, D dimensions of a head, K kept; C input
channels of a convolution, U = C T columns of its patches, T taps of each channel in a row.
Higher scores are kept. The eliminations that look at channels together live in obs.py.
"""

import torch
from torch import Tensor


def producer_l1(first_FI: Tensor) -> Tensor:
    """||V_i,:||_1 of the first layer's row, without its bias (GRAIL's magnitude pruning; its p = 1)."""
    return first_FI.abs().sum(dim=1)


def producer_l2(first_FI: Tensor) -> Tensor:
    """||V_i,:||_2 of the first layer's row, without its bias (GRAIL's magnitude pruning; its p = 2)."""
    norm_F: Tensor = torch.linalg.vector_norm(first_FI, dim=1)
    return norm_F


def magnitude(weight_OF: Tensor) -> Tensor:
    """||W_:,i||: the norm of what channel i feeds into the output."""
    norm_F: Tensor = torch.linalg.vector_norm(weight_OF, dim=0)
    return norm_F


def combined(second_F: Tensor, weight_OF: Tensor) -> Tensor:
    """E[x_i^2] * ||W_:,i|| (CORP, section 3.3; the paper's default)."""
    return second_F * magnitude(weight_OF)


def wanda(second_F: Tensor, weight_OF: Tensor) -> Tensor:
    """sum_o |W_oi| * ||x_i||, with the root mean square of x_i for its norm (Wanda, per channel)."""
    return weight_OF.abs().sum(dim=0) * second_F.clamp_min(0.0).sqrt()


def _over_taps(score_U: Tensor, taps: int) -> Tensor:
    """[C T] -> [C], the sum over a channel's columns."""
    return score_U.view(-1, taps).sum(dim=1)


def energy_patches(second_U: Tensor, taps: int) -> Tensor:
    """sum_t E[u_ct^2]: `energy` of what the kernel's places see, which padding and strides weigh."""
    return _over_taps(second_U, taps)


def magnitude_patches(weight_OU: Tensor, taps: int) -> Tensor:
    """||W_:,c,:||_F: `magnitude` over all of a channel's columns; weight_OU is conv.weight.flatten(1)."""
    return _over_taps(weight_OU.square().sum(dim=0), taps).sqrt()


def combined_patches(second_U: Tensor, weight_OU: Tensor, taps: int) -> Tensor:
    """sum_t E[u_ct^2] * ||W_:,ct||: `combined` added up over a channel's columns."""
    return _over_taps(combined(second_U, weight_OU), taps)


def wanda_patches(second_U: Tensor, weight_OU: Tensor, taps: int) -> Tensor:
    """sum_t sum_o |W_oct| * rms(u_ct): `wanda` added up over a channel's columns."""
    return _over_taps(wanda(second_U, weight_OU), taps)


def logit_energy(energy_HD: Tensor, images: int) -> Tensor:
    """s_j = E[||q_j||^2 ||k_j||^2] over images, column norms over an image's tokens (CORP, algorithm 4)."""
    assert images > 0, images
    return energy_HD / images


def logit_magnitude(q_weight_HDI: Tensor, k_weight_HDI: Tensor) -> Tensor:
    """||w_Q,j||^2 ||w_K,j||^2 from the rows of the projections (CORP's first version, section 4.4 and eq. 36)."""
    return q_weight_HDI.square().sum(dim=2) * k_weight_HDI.square().sum(dim=2)


def shared_by_groups(value_HX: Tensor, grouped: int) -> Tensor:
    """The sum over so many heads in turn, for each of them [H,X]: what ranks what they share."""
    if grouped == 1:
        return value_HX
    shared_GX: Tensor = value_HX.unflatten(0, (-1, grouped)).sum(dim=1)
    return shared_GX.repeat_interleave(grouped, dim=0)


def kept_from_scores(score_F: Tensor, width: int) -> Tensor:
    """The `width` best indices along the last dimension, ascending, int64; ties go to the lower index."""
    assert 0 < width <= score_F.shape[-1], (width, tuple(score_F.shape))
    order = torch.sort(score_F, dim=-1, descending=True, stable=True).indices
    return order[..., :width].sort(dim=-1).values
