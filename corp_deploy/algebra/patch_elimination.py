"""In which order the input channels of a convolution leave: alone, in rounds over groups, or in units.

Legend: C channels, T taps, U = C T columns of patches, channel by channel, O outputs, G groups, B units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .block_obs import eliminate_blocks
from .obs import Elimination, obs


def eliminate_channels(
    covariance_UU: Tensor, weight_OU: Tensor, taps: int, *, ridge_rel: float, group_of_C: Tensor | None = None
) -> Elimination:
    """Order all channels by greedy backward elimination on patches; the objective is `obs`', which it is for one tap.

    covariance_UU: float64 [U, U] of patches; weight_OU: conv.weight.flatten(1); ridge_rel: relative to the mean
    diagonal. group_of_C: int64 [C], equally many channels in each; they leave in rounds, one of every group and the
    cheapest first, so that every multiple of G leaves equally many in each. Channels without variance or without weight
    cost nothing and go first, by index.
    """
    if taps == 1 and group_of_C is None:
        return obs(covariance_UU, weight_OU, ridge_rel=ridge_rel)
    return eliminate_blocks(covariance_UU, weight_OU, taps, ridge_rel=ridge_rel, group_of_C=group_of_C)


def interleaved(eliminations: Sequence[Elimination]) -> Elimination:
    """The separate eliminations of a grouped convolution's groups as one, round by round.

    Round r is the r-th removal of every group, in the groups' order; channels are numbered one group behind the other,
    equally many in each. Errors add up; `ridge` is the largest.
    """
    order_GC = torch.stack([elimination.order_F for elimination in eliminations])
    error_GC = torch.stack([elimination.error_F for elimination in eliminations])
    groups, channels = order_GC.shape
    first_G1 = channels * torch.arange(groups, device=order_GC.device)[:, None]
    cost_GC = error_GC.diff(dim=1, prepend=error_GC.new_zeros(groups, 1))
    return Elimination(
        order_F=(order_GC + first_G1).T.flatten(),
        error_F=cost_GC.T.flatten().cumsum(0),
        ridge=max(elimination.ridge for elimination in eliminations),
    )


def others_first(order: Elimination, channels: int, lost: float) -> Elimination:
    """The order of some of these channels, in front of them all others, each for an equal part of what they lose."""
    is_other_F = torch.ones(channels, dtype=torch.bool, device=order.order_F.device)
    is_other_F[order.order_F] = False
    others = is_other_F.nonzero().squeeze(1)
    parts = torch.arange(1, len(others) + 1, device=others.device, dtype=torch.float64) / max(len(others), 1)
    return Elimination(
        order_F=torch.cat((others, order.order_F)),
        error_F=torch.cat((lost * parts, lost + order.error_F)),
        ridge=order.ridge,
    )
