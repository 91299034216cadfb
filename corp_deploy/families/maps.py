"""What works on maps, within a residual stream of tokens.

Legend: B inputs, N = H * W tokens, row by row of a map, C channels.
"""

from torch import Tensor

Grid = tuple[int, int]
"""Height and width of a map."""


def map_from_tokens(x_BNC: Tensor, grid: Grid) -> Tensor:
    """[B,N,C] -> [B,C,H,W]; an error unless N is H * W."""
    height, width = grid
    return x_BNC.reshape(x_BNC.shape[0], height, width, x_BNC.shape[-1]).permute(0, 3, 1, 2)


def tokens_from_map(x_BCHW: Tensor) -> Tensor:
    """[B,C,H,W] -> [B,N,C]."""
    assert x_BCHW.ndim == 4, x_BCHW.shape
    return x_BCHW.flatten(2).mT
