"""A squeeze whose channels become fewer.

Legend: F channels, K kept, R of the squeeze.
"""

from torch import Tensor

from calib.moments import ChannelMoments
from corp_deploy.algebra import channels
from corp_deploy.families.squeeze import SqueezeExcite

from .method import Method


def narrowed_squeeze(dense: SqueezeExcite, kept_K: Tensor, moments: ChannelMoments, method: Method) -> SqueezeExcite:
    """What it made of all channels' means, of those that stay, by least squares on images' means: of these are the
    moments. Where the method repairs nothing, columns are dropped.
    """
    weight_RF, bias_R = dense.reduce.weight.detach().double(), dense.reduce.bias
    assert bias_R is not None, dense
    recover = channels.none if method.conv_recovery == "none" else channels.affine
    new = recover(
        moments.mean_F, moments.second_FF, weight_RF, bias_R.detach().double(), kept_K, ridge_rel=method.ridge_rel
    )
    return dense.narrowed(kept_K, new.weight_OK, new.bias_O)
