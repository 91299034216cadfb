"""A weighted mean of positive numbers, from some of them.

Legend: F numbers, K kept.
"""

import torch
from torch import Tensor

_STRENGTHS = tuple(10.0**power for power in range(-10, 5))


def mean_from_kept(second_FF: Tensor, weight_F: Tensor, kept_K: Tensor) -> Tensor:
    """Weights [K] with which w'g is told of g_S, from E[g g'] alone and without an offset, so that both scale alike.

    Were those that stay in a fixed proportion to the rest, c0 = kappa w_S would tell it, with kappa = E[w'g w_S'g_S] /
    E[(w_S'g_S)^2]. The regression is pulled toward that, argmin E(w'g - c'g_S)^2 + ridge |c - c0|^2, by the weakest
    ridge with which none of the weights is below zero: a mean that a norm is divided by must not come near zero, and an
    exact answer for numbers that are multiples of those that stay has no such weight. Float64.
    """
    kept_weight_K = weight_F[kept_K]
    gram_KK, cross_K = second_FF[kept_K[:, None], kept_K], second_FF[kept_K] @ weight_F
    square = (kept_weight_K @ gram_KK @ kept_weight_K).clamp_min(torch.finfo(gram_KK.dtype).tiny)
    start_K: Tensor = (kept_weight_K @ cross_K / square) * kept_weight_K
    values_K, vectors_KK = torch.linalg.eigh(gram_KK)
    left_K = vectors_KK.T @ (cross_K - gram_KK @ start_K)
    for strength in _STRENGTHS:
        ridge = strength * gram_KK.diagonal().mean()
        weight_K: Tensor = start_K + vectors_KK @ (left_K / (values_K.clamp_min(0.0) + ridge))
        if bool(torch.isfinite(weight_K).all()) and bool((weight_K >= 0.0).all()):
            return weight_K
    return start_K
