"""What an MLP's dense last layer becomes before any channel is chosen by it: fitted to what the streams lack.

Elimination then knows its target. With A = Cov(x) + ridge and W* = (Cov(t, x) + ridge W) A^-1, the loss of a kept set S
with the best weights toward the dense ones is const + min tr((W* - W_S) A (W* - W_S)'), which is what obs.py removes
channels by and `affine` solves: eliminating from W* is eliminating from the regression of the target t itself, with
what the stream lacks upstream in it.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from corp_deploy.algebra.regression_sums import RegressionSums

from .branch_sums import Halves
from .channels import ChannelLayers
from .correct import correction


def refitted(
    layers: ChannelLayers,
    lacking: Halves[RegressionSums],
    scale_C: Tensor | None,
    strengths: Sequence[float],
    *,
    both_ways: bool,
) -> ChannelLayers:
    """The layers, the last one fitted to what the reduced stream lacks, behind the layer scale, by a ridge toward the
    dense layer whose strength the held-out images choose, none at all among them.
    """
    weight_OF, bias_O = layers.second_OF, layers.second_bias_O
    bias_O = weight_OF.new_zeros(len(weight_OF)) if bias_O is None else bias_O
    scale_O = weight_OF.new_ones(len(weight_OF)) if scale_C is None else scale_C.double()
    left = lacking.each(lambda sums: sums.less(weight_OF * scale_O[:, None], bias_O * scale_O))
    change = correction(left.fit, left.held_out, scale_C, None, strengths, both_ways=both_ways)
    return replace(layers, second_OF=weight_OF + change.weight_CK, second_bias_O=bias_O + change.bias_C)
