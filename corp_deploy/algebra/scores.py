"""Scores that rank channels and dimensions, and the ranking itself.

Legend: F hidden channels of an MLP, I its inputs, O its outputs, H heads, D dimensions of a head, K kept; C input
channels of a layer, U = C T columns of its input, T taps of each channel in a row, one except for convolutions.
Higher scores are kept. The eliminations that look at channels together live in obs.py.
"""

import torch
from torch import Tensor


def producer(first_FI: Tensor, p: int) -> Tensor:
    """Return ||V_i,:||_p of each row of the first layer's weight [F] (GRAIL's magnitude pruning, p = 1 and 2)."""
    norm_F: Tensor = torch.linalg.vector_norm(first_FI, ord=p, dim=1)
    return norm_F


def _over_taps(score_U: Tensor, taps: int) -> Tensor:
    """Sum the scores of a channel's columns: [C T] -> [C]."""
    return score_U.view(-1, taps).sum(dim=1)


def energy(second_U: Tensor, taps: int = 1) -> Tensor:
    """Return sum_t E[u_ct^2] of each channel over patches, so that padding and strides count."""
    return _over_taps(second_U, taps)


def magnitude(weight_OU: Tensor, taps: int = 1) -> Tensor:
    """Return ||W_:,c,:||_F: the norm of a channel's weights into the output; weight_OU is conv.weight.flatten(1)."""
    return _over_taps(weight_OU.square().sum(dim=0), taps).sqrt()


def combined(second_U: Tensor, weight_OU: Tensor, taps: int = 1) -> Tensor:
    """Return sum_t E[u_ct^2] * ||W_:,ct|| (CORP, section 3.3; the paper's default)."""
    return _over_taps(second_U * torch.linalg.vector_norm(weight_OU, dim=0), taps)


def wanda(second_U: Tensor, weight_OU: Tensor, taps: int = 1) -> Tensor:
    """Return sum_t sum_o |W_oct| * ||u_ct||, with the root mean square of u_ct for its norm (Wanda, per channel)."""
    return _over_taps(weight_OU.abs().sum(dim=0) * second_U.clamp_min(0.0).sqrt(), taps)


def logit_energy(energy_HD: Tensor, images: int) -> Tensor:
    """Return s_j = E[||q_j||^2 ||k_j||^2] from its sum over images, norms over an image's tokens (CORP, alg. 4)."""
    assert images > 0, images
    return energy_HD / images


def logit_magnitude(q_weight_HDI: Tensor, k_weight_HDI: Tensor) -> Tensor:
    """Return ||w_Q,j||^2 ||w_K,j||^2 from the projections' rows (CORP's first version, section 4.4 and eq. 36)."""
    return q_weight_HDI.square().sum(dim=2) * k_weight_HDI.square().sum(dim=2)


def shared_by_groups(value_HX: Tensor, grouped: int) -> Tensor:
    """Sum the values of each run of `grouped` consecutive heads and give each head its run's sum [H,X].

    Heads that share keys are so ranked alike.
    """
    if grouped == 1:
        return value_HX
    shared_GX: Tensor = value_HX.unflatten(0, (-1, grouped)).sum(dim=1)
    return shared_GX.repeat_interleave(grouped, dim=0)


def kept_from_scores(score_F: Tensor, width: int) -> Tensor:
    """Return the `width` best indices along the last dimension, ascending, int64; ties go to the lower index."""
    assert 0 < width <= score_F.shape[-1], (width, tuple(score_F.shape))
    order = torch.sort(score_F, dim=-1, descending=True, stable=True).indices
    return order[..., :width].sort(dim=-1).values


def complement(kept_K: Tensor, count: int) -> Tensor:
    """Return the indices below `count` that are not kept, ascending, int64."""
    is_left = torch.ones(count, dtype=torch.bool, device=kept_K.device)
    is_left[kept_K] = False
    return is_left.nonzero().squeeze(1)


def selection(kept_K: Tensor, count: int) -> Tensor:
    """Return one-hot rows [...,K,count], float64: row i is 1 at index kept_K[..., i]."""
    return torch.nn.functional.one_hot(kept_K, count).to(torch.float64)
