"""Statistics of uncentred second moments: means set to zero, second moments as they are.

A layer without a bias can't give back the mean of what is lost. A fit on such statistics is the best one without a bias
(least squares on second moments), its bias is zero, and what it leaves is counted with its mean.
"""

from dataclasses import replace

import torch

from calib.moments import ChannelMoments
from corp_deploy.algebra.regression_sums import Gram, RegressionSums


def channels_uncentred(moments: ChannelMoments) -> ChannelMoments:
    """Of what enters a last layer that has no bias."""
    return replace(moments, sum_F=torch.zeros_like(moments.sum_F))


def gram_uncentred(gram: Gram) -> Gram:
    """Of inputs."""
    return Gram(tokens=gram.tokens, sum_K=torch.zeros_like(gram.sum_K), upper_KK=gram.upper_KK)


def regression_uncentred(sums: RegressionSums) -> RegressionSums:
    """Of inputs and targets."""
    t_O = torch.zeros_like(sums.t_O)
    return RegressionSums(x=gram_uncentred(sums.x), t_O=t_O, tx_OK=sums.tx_OK, tt=sums.tt)
