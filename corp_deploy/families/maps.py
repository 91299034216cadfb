"""What works on maps, within a residual stream of tokens.

Legend: B inputs, N = H * W tokens, row by row of a map, C channels.
"""

from torch import Tensor, nn

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


class OnMap(nn.Module):
    """A module of maps [B,C,H,W] for tokens [B,N,C]; what it gives may be another map of other channels."""

    def __init__(self, inner: nn.Module, grid: Grid) -> None:
        super().__init__()
        self.inner, self.grid = inner, grid

    def forward(self, x: Tensor) -> Tensor:
        return tokens_from_map(self.inner(map_from_tokens(x, self.grid)))


class OnRows(nn.Module):
    """A module of maps with channels last [B,H,W,C] for tokens [B,N,C], likewise."""

    def __init__(self, inner: nn.Module, grid: Grid) -> None:
        super().__init__()
        self.inner, self.grid = inner, grid

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.unflatten(1, self.grid))
        return out.flatten(1, 2)


def grid_behind(module: nn.Module, channels: int, grid: Grid) -> tuple[int, Grid]:
    """Channels and grid of what a module of maps makes of one of so many channels, its convolutions one behind the
    other; nothing is run.
    """
    for convolution in module.modules():
        if isinstance(convolution, nn.Conv2d):
            channels, grid = convolution.out_channels, _behind(convolution, grid)
    return channels, grid


def _behind(convolution: nn.Conv2d, grid: Grid) -> Grid:
    """As torch.nn.Conv2d has it."""
    assert not isinstance(convolution.padding, str), convolution
    sizes = zip(
        grid,
        convolution.kernel_size,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        strict=True,
    )
    height, width = ((n + 2 * pad - spread * (k - 1) - 1) // stride + 1 for n, k, stride, pad, spread in sizes)
    return height, width
