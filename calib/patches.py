"""What a convolution reads: its patches (im2col), in the order of its weights.

Shapes: B images, C all channels of the map, H rows, W columns; N places of the output, row by row, G groups, R channels
of a group, T places of the kernel, U = R T columns of a patch: by channel, then by place, as conv.weight.flatten(1).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ground.errors import BadInput

from .sites import Edges


def edges_of(conv: nn.Conv2d) -> Edges:
    """Zeros that it puts left, right, above and below the map. Raises BadInput where it puts anything else."""
    if conv.padding_mode != "zeros":
        raise BadInput(f"a convolution pads by {conv.padding_mode!r}; only zero padding is supported")
    if conv.padding == "valid":
        return 0, 0, 0, 0
    if isinstance(conv.padding, str):
        rows, columns = (step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True))
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
    rows, columns = conv.padding
    return columns, columns, rows, rows


def padded(x_BCHW: Tensor, conv: nn.Conv2d, edges: Edges | None) -> Tensor:
    """The map with the zeros around it, float32, float64 where it was."""
    own = edges_of(conv)
    x_BCHW = x_BCHW if x_BCHW.dtype == torch.float64 else x_BCHW.float()
    return functional.pad(x_BCHW, own if edges is None else edges).contiguous()


def grid_of(x_BCHW: Tensor, conv: nn.Conv2d) -> tuple[int, int]:
    """Rows and columns of what it gives for a padded map."""
    spans = (step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True))
    rows, columns = (
        (length - span - 1) // stride + 1
        for length, span, stride in zip(x_BCHW.shape[2:], spans, conv.stride, strict=True)
    )
    return rows, columns


def patches_of_rows(x_BCHW: Tensor, conv: nn.Conv2d, rows: range) -> Tensor:
    """Patches [B,N,G,U] of some rows of the output, from a padded map of all or of some channels of each group.

    They lie in memory by [G,U,B,N], as products over B and N want them.
    """
    (kernel_h, kernel_w), (stride_h, stride_w), (dilation_h, dilation_w) = conv.kernel_size, conv.stride, conv.dilation
    image, channel, row, column = x_BCHW.stride()
    of_group, columns = x_BCHW.shape[1] // conv.groups, grid_of(x_BCHW, conv)[1]
    size = (conv.groups, of_group, kernel_h, kernel_w, len(x_BCHW), len(rows), columns)
    stride = (
        of_group * channel,
        channel,
        dilation_h * row,
        dilation_w * column,
        image,
        stride_h * row,
        stride_w * column,
    )
    start = x_BCHW.storage_offset() + rows.start * stride_h * row
    u_GUBN = x_BCHW.as_strided(size, stride, start).contiguous().flatten(5).flatten(1, 3)
    return u_GUBN.permute(2, 3, 0, 1)


def patches(x_BCHW: Tensor, conv: nn.Conv2d, edges: Edges | None = None) -> Tensor:
    """Patches [B,N,G,U] as `conv` reads them, or with `edges` of zeros (left, right, above, below) for its own.

    patches @ conv.weight of the group, plus the bias, is what it gives. Raises BadInput unless it pads by zeros.
    """
    x_BCHW = padded(x_BCHW, conv, edges)
    return patches_of_rows(x_BCHW, conv, range(grid_of(x_BCHW, conv)[0]))
