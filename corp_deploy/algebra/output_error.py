"""What the output of a linear layer loses when the layer changes, exactly, from the moments of its inputs.

Legend: F inputs, O outputs.
"""

import torch
from torch import Tensor


def variance(weight_OF: Tensor, covariance_FF: Tensor) -> float:
    """tr(W C W'), never below zero by rounding: the variance of W x, and E||W x||^2 where C is the second moment."""
    return max(float(((weight_OF @ covariance_FF) * weight_OF).sum()), 0.0)


def output_error(mean_F: Tensor, second_FF: Tensor, change_OF: Tensor, bias_change_O: Tensor) -> float:
    """E||D x + d||^2 = tr(D C D') + ||D mu + d||^2 for weights that change by D and a bias by d."""
    covariance_FF = second_FF - torch.outer(mean_F, mean_F)
    shift_O = change_OF @ mean_F + bias_change_O
    return variance(change_OF, covariance_FF) + float(shift_O.square().sum())
