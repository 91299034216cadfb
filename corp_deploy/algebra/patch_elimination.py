"""In which order the input channels of a convolution leave: alone, in rounds over groups, or in units.

Legend: C channels, T taps, U = C T columns of patches, channel by channel, O outputs, G groups, B units.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .block_obs import eliminate_blocks
from .obs import Elimination, obs
from .patches import columns


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


def elimination_of_units(
    covariance_UU: Tensor, weight_OU: Tensor, taps: int, unit_of_C: Tensor, *, ridge_rel: float
) -> Elimination:
    """Order channels that can only leave in whole units, groups of a norm say; `eliminate_channels` otherwise.

    unit_of_C: int64 [C], from 0, equally many channels in each. order_F lists channels unit by unit; inside of a unit
    error_F is the error at its end.
    """
    count_B = unit_of_C.bincount()
    size = int(count_B[0])
    assert bool((count_B == size).all()), count_B.tolist()
    channel_C = unit_of_C.argsort(stable=True)
    column_U = columns(channel_C, taps)
    covariance_UU, weight_OU = covariance_UU[column_U[:, None], column_U], weight_OU[:, column_U]
    of_units = eliminate_channels(covariance_UU, weight_OU, size * taps, ridge_rel=ridge_rel)
    return Elimination(
        order_F=channel_C[columns(of_units.order_F, size)],
        error_F=of_units.error_F.repeat_interleave(size),
        ridge=of_units.ridge,
    )


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
