"""The Gram of patches where a convolution takes every row: most of its blocks are one product, told apart by borders.

A patch is kernel rows a = 0, 1, ..., each a row of the padded map, and block (a, b) of the Gram sums v(q) v(q + b - a)'
over the rows q that place a of the kernel comes over. These differ by a alone at the border: what all blocks of one
offset b - a share is multiplied once, then each gets its own rows of the border. Nothing is subtracted.

Columns of patches lie by the kernel's row, by channel, by its column here. Shapes: B images, C all channels of a map, H
rows, W columns; n places of a row in all images, G groups, V = channels of a group times columns of the kernel.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .patches import grid_of
from .products import CPU_ROWS, Kernel, add_product_, mirror_


def takes_every_row(conv: nn.Conv2d, rows: int) -> bool:
    """Whether blocks of its Gram share products where it gives so many rows."""
    return conv.stride[0] == 1 and conv.kernel_size[0] > 1 and rows > (conv.kernel_size[0] - 1) * conv.dilation[0]


def row_patches(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor:
    """[G,V,H,n]: what the kernel's columns come over in every row of a padded map."""
    image, channel, row, column = x_BCHW.stride()
    wide, columns = conv.kernel_size[1], grid_of(x_BCHW, conv)[1]
    of_group, high = x_BCHW.shape[1] // conv.groups, x_BCHW.shape[2]
    size = (conv.groups, of_group, wide, high, len(x_BCHW), columns)
    stride = (of_group * channel, channel, conv.dilation[1] * column, row, image, conv.stride[1] * column)
    return x_BCHW.as_strided(size, stride).contiguous().flatten(4).flatten(1, 2)


def _spans(rows: int, apart: int, offset: int, given: int) -> Iterator[tuple[range, int, int]]:
    """Which places of the kernel come over which rows, the places all before the one `offset` further on."""
    last = rows - 1 - offset
    yield range(last + 1), last * apart, given
    for place in range(last):
        yield range(place + 1), place * apart, (place + 1) * apart
        yield range(place + 1, last + 1), given + place * apart, given + (place + 1) * apart


def add_gram_by_rows_(total_UU: Tensor, v_VHn: Tensor, conv: nn.Conv2d, there: range, kernel: Kernel) -> None:
    """Adds the blocks on and above the diagonal; `mirror_rows_` fills the rest. Map rows not `there` are zero."""
    rows, apart = conv.kernel_size[0], conv.dilation[0]
    given = v_VHn.shape[1] - (rows - 1) * apart
    total_aVbV = total_UU.unflatten(1, (rows, -1)).unflatten(0, (rows, -1))
    for offset in range(rows):
        ahead = offset * apart
        for places, start, stop in _spans(rows, apart, offset, given):
            start, stop = max(start, there.start), min(stop, there.stop - ahead)
            if start < stop:
                left_Vm, right_Vm = (v_VHn[:, start + more : stop + more].flatten(1) for more in (0, ahead))
                blocks = [total_aVbV[place, :, place + offset] for place in places]
                add_product_(blocks, left_Vm, right_Vm, kernel, upper=not offset)


def mirror_rows_(total_UU: Tensor, rows: int) -> None:
    """Copies what lies above the diagonal blocks of `add_gram_by_rows_` below them, in place."""
    width = len(total_UU) // rows
    for start in range(0, len(total_UU), width):
        stop = start + width
        mirror_(total_UU[start:stop, start:stop])
        total_UU[stop:, start:stop] = total_UU[start:stop, stop:].T


def by_row_columns(channels: int, kernel: tuple[int, ...]) -> Tensor:
    """Where each column of patches that lie by the kernel's row stands in the order of the weights."""
    rows, columns = kernel
    return torch.arange(channels * rows * columns).view(channels, rows, columns).transpose(0, 1).flatten()


def reorder_(total_UU: Tensor, order_U: Tensor) -> None:
    """Entry (i, j) becomes what stood at order_U[i], order_U[j]; in place, a few rows at a time."""
    for part_RU in total_UU.split(CPU_ROWS):
        part_RU.copy_(part_RU[:, order_U])
    for part_UR in total_UU.split(CPU_ROWS, dim=1):
        part_UR.copy_(part_UR[order_U])
