"""Running float64 sums of one convolution's patches (im2col) and outputs, a few images or rows at a time.

Shapes: B images, C channels, H rows, W columns, O outputs; N places of the output, G groups, R channels of a group, T
places of the kernel, U = R T columns of a patch as conv.weight.flatten(1); P outputs of a group, n places of several
images.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ground.errors import BadInput

from .moments import SiteMoments
from .patch_moments import PatchMoments
from .products import CPU_ROWS, TERMS, Kernel, PassWeights, add_gram_
from .sites import PatchTaps, Role
from .sums import RunningSums


def _edges(conv: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the zero padding left, right, above and below the map. Raises BadInput for other padding than zeros."""
    if conv.padding_mode != "zeros":
        raise BadInput(f"a convolution pads by {conv.padding_mode!r}; only zero padding is supported")
    if conv.padding == "valid":
        return 0, 0, 0, 0
    if isinstance(conv.padding, str):
        rows, columns = (step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True))
        return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2
    rows, columns = conv.padding
    return columns, columns, rows, rows


def padded_map(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor:
    edges, x_BCHW = _edges(conv), x_BCHW if x_BCHW.dtype == torch.float64 else x_BCHW.float()
    return functional.pad(x_BCHW, edges).contiguous()


def grid_of(x_BCHW: Tensor, conv: nn.Conv2d) -> tuple[int, int]:
    spans = (step * (size - 1) for step, size in zip(conv.dilation, conv.kernel_size, strict=True))
    rows, columns = (
        (length - span - 1) // stride + 1
        for length, span, stride in zip(x_BCHW.shape[2:], spans, conv.stride, strict=True)
    )
    return rows, columns


def patches_of_rows(x_BCHW: Tensor, conv: nn.Conv2d, rows: range) -> Tensor:
    """Return patches [B,N,G,U] of some rows of the output, in the memory layout [G,U,B,N] for products over B and N."""
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


def patches_of_map(x_BCHW: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return patches [B,N,G,U], whose products with the groups' weights, plus bias, are the convolution's output.

    Raises BadInput for other padding than zeros.
    """
    x_BCHW = padded_map(x_BCHW, conv)
    return patches_of_rows(x_BCHW, conv, range(grid_of(x_BCHW, conv)[0]))


PATCH_BYTES = 64 * 1024**2
FLOAT32_BYTES = 4


def _add_grams_(total_GUU: Tensor, u_BNGU: Tensor, kernel: Kernel) -> None:
    groups, width = total_GUU.shape[:2]
    if groups == 1 or width > CPU_ROWS:
        for group in range(groups):
            add_gram_(total_GUU[group], u_BNGU[:, :, group], kernel)
        return
    for u_GUn in u_BNGU.permute(2, 3, 0, 1).flatten(2).split(TERMS, dim=2):
        total_GUU.add_(torch.bmm(u_GUn, u_GUn.mT))


def _per_channel(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.sum((2, 3)).double().sum(0)


def _portions(images: int, rows: int, most: int) -> Iterator[tuple[slice, range]]:
    """Yield images and output rows of nearly equal parts: whole images of at most `most` rows, or rows of one."""
    if rows > most:
        parts = math.ceil(rows / most)
        spans = [range(rows * part // parts, rows * (part + 1) // parts) for part in range(parts)]
        yield from ((slice(image, image + 1), span) for image in range(images) for span in spans)
        return
    parts = math.ceil(images / (most // rows))
    for part in range(parts):
        yield slice(images * part // parts, images * (part + 1) // parts), range(rows)


class PatchSums(RunningSums[PatchMoments]):
    """Sums of a convolution's input map x [B,C,H,W], of its patches, and of its output y [B,O,H',W']."""

    def __init__(self, site: PatchTaps, *, eps: float) -> None:
        telling = ["map_sum_GC", "sum_GU", "target_square_O", "map_gram_GCC", "gram_GUU"]
        names = [] if site.channels_GR is None else ["cross_GPU"]
        super().__init__(PatchMoments, ["map_tokens", "tokens"], telling, *names)
        self.site, self.eps = site, eps
        self._x_BCHW: Tensor | None = None

    def add(self, role: Role, map_BCHW: Tensor, weights: PassWeights | None = None) -> None:
        assert weights is None, self.site.name
        if role == "x":
            self._x_BCHW = map_BCHW
            return
        assert role == "y", role
        x_BCHW, self._x_BCHW = self._x_BCHW, None
        assert x_BCHW is not None, self.site.name
        self.allocate(self.site.sizes, x_BCHW.device)
        self._add_map(x_BCHW.float())
        self._add_outputs(map_BCHW.float())
        self._add_patches(x_BCHW, map_BCHW.float())

    def _add_map(self, x_BCHW: Tensor) -> None:
        groups = self.site.output.groups
        self.totals["map_sum_GC"].add_(_per_channel(x_BCHW).view(groups, -1))
        above_BCHW = (x_BCHW.abs() > self.eps).float()
        self.totals["active_GC"].add_(_per_channel(above_BCHW).view(groups, -1))
        x_BNGC = x_BCHW.flatten(2).mT.unflatten(2, (groups, -1))
        _add_grams_(self.totals["map_gram_GCC"], x_BNGC, self.kernel)
        self.counts["map_tokens"] += x_BNGC.shape[0] * x_BNGC.shape[1]

    def _add_outputs(self, y_BOHW: Tensor) -> None:
        self.totals["target_sum_O"].add_(_per_channel(y_BOHW))
        self.totals["target_square_O"].add_(_per_channel(y_BOHW.square()))
        self.counts["tokens"] += y_BOHW.shape[0] * y_BOHW.shape[2] * y_BOHW.shape[3]

    def _add_patches(self, x_BCHW: Tensor, y_BOHW: Tensor) -> None:
        conv = self.site.output
        x_BCHW = padded_map(self._choose_channels(x_BCHW), conv)
        rows, columns = grid_of(x_BCHW, conv)
        if y_BOHW.shape[2:] != (rows, columns):
            raise BadInput(
                f"{self.site.name}: gives a map of {list(y_BOHW.shape[2:])}, expected {[rows, columns]} with its "
                f"padding of {conv.padding}: it pads its input in another way; leave this site out"
            )
        most = PATCH_BYTES // (FLOAT32_BYTES * x_BCHW.shape[1] * self.site.places)
        if x_BCHW.device.type == "cpu":
            most = min(most, TERMS)
        for images, span in _portions(len(x_BCHW), rows, max(1, most // columns)):
            u_BNGU = patches_of_rows(x_BCHW[images], conv, span)
            self.totals["sum_GU"].add_(u_BNGU.sum(1).double().sum(0))
            _add_grams_(self.totals["gram_GUU"], u_BNGU, self.kernel)
            if "cross_GPU" in self.totals:
                self._add_cross(y_BOHW[images, :, span.start : span.stop], u_BNGU)

    def _add_cross(self, y_BOHW: Tensor, u_BNGU: Tensor) -> None:
        groups = self.site.output.groups
        y_GPn = y_BOHW.unflatten(1, (groups, -1)).permute(1, 2, 0, 3, 4).flatten(2)
        u_GUn = u_BNGU.permute(2, 3, 0, 1).flatten(2)
        for left_GPn, right_GUn in zip(y_GPn.split(TERMS, dim=2), u_GUn.split(TERMS, dim=2), strict=True):
            self.totals["cross_GPU"].add_(torch.bmm(left_GPn, right_GUn.mT))

    def _choose_channels(self, x_BCHW: Tensor) -> Tensor:
        if self.site.channels_GR is None:
            return x_BCHW
        channels_GR = self.site.channels_GR.to(x_BCHW.device)
        first_G1 = torch.arange(len(channels_GR), device=x_BCHW.device)[:, None] * self.site.group_width
        return x_BCHW[:, (channels_GR + first_G1).flatten()]

    def load(self, moments: SiteMoments, device: torch.device) -> None:
        assert isinstance(moments, PatchMoments), moments
        own, theirs = self.site.channels_GR, moments.channels_GR
        if (None if own is None else own.tolist()) != (None if theirs is None else theirs.tolist()):
            raise BadInput(f"{self.site.name}: the sums so far have patches of other channels; start afresh")
        super().load(moments, device)

    def constants(self) -> dict[str, Any]:
        channels_GR = None if self.site.channels_GR is None else self.site.channels_GR.cpu()
        return {"taps": self.site.places, "eps": self.eps, "channels_GR": channels_GR}
