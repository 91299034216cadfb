"""Keys centred over the tokens of their own input: softmax can't tell them from keys as they are.

Products are taken of c = k - mean, then shifted back in float64: no cancellation either way.

Shapes: B inputs, H heads, N tokens, D dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .products import grams_of_heads
from .weights import Weights, weighted, weighted_by_root


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CentredKeys:
    """Each input's Gram of c, the mean, the sum of c, which is only near zero, and the sum of k; float64.

    `rest_HDD` is the sum over inputs of (sum of c)(sum of c)' / n: what a second moment about the true mean lacks.
    """

    gram_BHDD: Tensor
    mean_BHD: Tensor
    rest_BHD: Tensor
    sum_BHD: Tensor
    rest_HDD: Tensor

    def uncentred_BHDD(self) -> Tensor:
        """k'k = c'c + (n mean + r) mean' + mean r', r the sum of c."""
        left_BHD2 = torch.stack([self.sum_BHD, self.mean_BHD], dim=-1)
        right_BH2D = torch.stack([self.mean_BHD, self.rest_BHD], dim=-2)
        return self.gram_BHDD + left_BHD2 @ right_BH2D

    def centred_HDD(self) -> Tensor:
        """Sum over inputs of (k - true mean)'(k - true mean)."""
        return self.gram_BHDD.sum(0) - self.rest_HDD


def centred_keys(k_BHND: Tensor) -> CentredKeys:
    """Every token counts once."""
    count = k_BHND.shape[2]
    mean_BH1D = k_BHND.float().mean(2, keepdim=True)
    c_BHND = torch.sub(k_BHND, mean_BH1D, out=torch.empty(k_BHND.shape, device=k_BHND.device))
    rest_BHD, mean_BHD = c_BHND.sum(2).double(), mean_BH1D.squeeze(2).double()
    return CentredKeys(
        gram_BHDD=grams_of_heads(c_BHND),
        mean_BHD=mean_BHD,
        rest_BHD=rest_BHD,
        sum_BHD=mean_BHD * count + rest_BHD,
        rest_HDD=rest_BHD.permute(1, 2, 0) @ rest_BHD.transpose(0, 1) / count,
    )


def weighted_keys(k_BHND: Tensor, weights: Weights) -> CentredKeys:
    """Every token counts by its weight, in the mean too; an input whose weights are all zero adds nothing."""
    count_B11 = weights.weight_BN.double().sum(1)[:, None, None]
    divisor_B11 = torch.where(count_B11 > 0, count_B11, 1.0)
    mean_BH1D = weighted(k_BHND, weights).sum(2, keepdim=True) / divisor_B11.float()[..., None]
    c_BHND = k_BHND.float() - mean_BH1D
    rest_BHD, mean_BHD = weighted(c_BHND, weights).sum(2).double(), mean_BH1D.squeeze(2).double()
    return CentredKeys(
        gram_BHDD=grams_of_heads(weighted_by_root(c_BHND, weights)),
        mean_BHD=mean_BHD,
        rest_BHD=rest_BHD,
        sum_BHD=mean_BHD * count_B11 + rest_BHD,
        rest_HDD=(rest_BHD / divisor_B11).permute(1, 2, 0) @ rest_BHD.transpose(0, 1),
    )
