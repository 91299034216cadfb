"""Five closed forms for the second linear layer of an MLP after some of its inputs are removed.

Each takes the moments of the input x, the layer y = W x + b and the kept channels, and returns the new layer with its
error on the calibration distribution, computed exactly from the moments (CORP, eq. 52-54 and 63-65).

Legend: F channels, K kept, P pruned, O outputs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from .quadratic import RidgeSolution, explained, solve_ridge, variance
from .scores import complement

Form = Literal["none", "bias", "gram", "affine", "affine-v1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRecovery:
    """The new layer y' = weight x_K + bias; the defaults are those of a layer that loses nothing.

    residual: E||y - y'||^2; residual_uncompensated: the same if the channels were just dropped (eq. 63);
    r2: share of the variance of the dropped part that the kept channels explain (eq. 65); condition, ridge: those of
    the least-squares solve, 1 and 0 without a solve.
    """

    weight_OK: Tensor
    bias_O: Tensor
    residual: float = 0.0
    residual_uncompensated: float = 0.0
    r2: float = 1.0
    condition: float = 1.0
    ridge: float = 0.0

    def __post_init__(self) -> None:
        assert self.residual >= 0.0, self.residual
        assert self.weight_OK.shape[0] == self.bias_O.shape[0], (self.weight_OK.shape, self.bias_O.shape)


def judge_layer(
    mean_F: Tensor,
    second_FF: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor,
    kept_K: Tensor,
    new_weight_OK: Tensor,
    new_bias_O: Tensor,
    solved: RidgeSolution,
) -> ChannelRecovery:
    """Return the new layer with its exact errors, and the condition and ridge of `solved`."""
    covariance_FF = second_FF - torch.outer(mean_F, mean_F)
    pruned_P = complement(kept_K, mean_F.numel())
    dropped_OP, mean_P = weight_OF[:, pruned_P], mean_F[pruned_P]
    dropped_variance = variance(dropped_OP, covariance_FF[pruned_P[:, None], pruned_P])
    change_OF = weight_OF.clone()
    change_OF[:, kept_K] -= new_weight_OK
    left_variance = variance(change_OF, covariance_FF)
    shift_O = change_OF @ mean_F + bias_O - new_bias_O
    return ChannelRecovery(
        weight_OK=new_weight_OK,
        bias_O=new_bias_O,
        residual=left_variance + float(shift_O.square().sum()),
        residual_uncompensated=dropped_variance + float((dropped_OP @ mean_P).square().sum()),
        r2=explained(left_variance, dropped_variance),
        condition=solved.condition,
        ridge=solved.ridge,
    )


def recover_channels(
    form: Form,
    mean_F: Tensor,
    second_FF: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor | None,
    kept_K: Tensor,
    *,
    ridge_rel: float,
) -> ChannelRecovery:
    """Return the new layer on the kept channels and its errors, where G = E[x x'], mu = E[x], C = G - mu mu'.

    * `none`: the columns are dropped and nothing else;
    * `bias`: b' = b + W_P mu_P (FLAP, variance-based pruning);
    * `gram`: W' = W B, x ~ B x_K, B = G_:K (G_KK + ridge I)^-1; the bias stays (GRAIL, 3.1). The kept channels go
      through it too, as published, so that a large ridge shrinks the layer and can lose to dropping;
    * `affine`: x_P ~ B x_K + c with B = C_PK (C_KK + ridge I)^-1, c = mu_P - B mu_K, folded: W' = W_K + W_P B,
      b' = b + W_P c (CORP, eq. 9, 50 and 51);
    * `affine-v1`: the same with B = G_PK (G_KK + ridge I)^-1 (CORP's first version, eq. 9-11). That isn't the best B
      for its c, so it can lose to `bias`.

    ridge = ridge_rel * mean diagonal of the matrix that it is added to.
    """
    old_O = weight_OF.new_zeros(weight_OF.shape[0]) if bias_O is None else bias_O
    pruned_P = complement(kept_K, mean_F.numel())
    dropped_OP, gram_KK = weight_OF[:, pruned_P], second_FF[kept_K[:, None], kept_K]
    new_OK, new_O = weight_OF[:, kept_K], old_O.clone()
    solved = RidgeSolution(solution_OK=new_OK)
    if form == "bias":
        new_O = old_O + dropped_OP @ mean_F[pruned_P]
    elif form == "gram":
        solved = solve_ridge(weight_OF @ second_FF[:, kept_K], gram_KK, ridge_rel=ridge_rel)
        new_OK = solved.solution_OK
    elif form != "none":
        cross_PK, mean_K = second_FF[pruned_P[:, None], kept_K], mean_F[kept_K]
        if form == "affine":
            cross_PK = cross_PK - torch.outer(mean_F[pruned_P], mean_K)
            gram_KK = gram_KK - torch.outer(mean_K, mean_K)
        solved = solve_ridge(dropped_OP @ cross_PK, gram_KK, ridge_rel=ridge_rel)  # W_P B, without forming B
        new_O = old_O + dropped_OP @ mean_F[pruned_P] - solved.solution_OK @ mean_K
        new_OK = new_OK + solved.solution_OK
    return judge_layer(mean_F, second_FF, weight_OF, old_O, kept_K, new_OK, new_O, solved)


none, bias, gram, affine, affine_v1 = (partial(recover_channels, form) for form in get_args(Form))
